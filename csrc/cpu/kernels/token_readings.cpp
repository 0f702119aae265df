// Chosen logits, their true ranks, log-sum-exp, argmax and, if asked, entropy of rows of logits, in one pass over
// memory.
//
// A row is read in segments of fixed size that stay in the first-level cache while they are looked at three times:
// for the maximum, for the sum of exponentials, for the ranks. A segment's results do not depend on the number of
// threads or on the other rows, and segments are joined in order, so neither do a row's.
//
// The ranks are the dear part: W comparisons an element. Of the chosen logits, sorted, a block of elements needs
// only those between its minimum and its maximum; above them nothing counts, below them everything does. Beyond
// kSortAbove columns a sort of the row is cheaper.
#include <math.h>

#include "../kernels.h"
#include "../logits.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int64_t kSegment = 4096;
constexpr int64_t kBlock = 512;
constexpr int64_t kSortAbove = 192;
// Threshold arrays are padded to this, so that they are compared by whole vectors.
constexpr int64_t kThresholdPad = 16;

struct Segment {
  float max;
  int32_t argmax;
  double sum;  // of exp(x - max), or of about 0 when the maximum is -inf; NaN if there is a NaN
  double weighted;  // the sum of (x - max) * exp(x - max), if asked
};

struct Chosen {
  float value;
  int32_t column;
};

// Adds to each lane of counts[g] how many of the elements exceed thresholds[g], for G of them. Floats count exactly
// up to a segment's size.
template <int G>
inline void count_group(const float* x, int64_t n, const float* thresholds, Vec* counts) {
  Vec count[G], limit[G];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    count[g] = counts[g];
    limit[g] = set1(thresholds[g]);
  }
  const Vec one = set1(1.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load(x + i);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) count[g] = add_where(gt(v, limit[g]), count[g], one);
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) counts[g] = count[g];
}

inline void count_above(const float* x, int64_t n, const float* thresholds, Vec* counts, int64_t width) {
  constexpr int kGroup = kLanes == 16 ? 8 : 4;
  int64_t w = 0;
  for (; w + kGroup <= width; w += kGroup) count_group<kGroup>(x, n, thresholds + w, counts + w);
  for (; w + 2 <= width; w += 2) count_group<2>(x, n, thresholds + w, counts + w);
  for (; w < width; ++w) count_group<1>(x, n, thresholds + w, counts + w);
}

// How many of the padded thresholds are >= value.
inline int64_t num_at_least(const float* thresholds, int64_t padded, float value) {
  int32_t count = 0;
  for (int64_t w = 0; w < padded; ++w) count += thresholds[w] >= value;
  return count;
}

// Extremes of each block of the segment.
inline void block_extremes(const float* x, int64_t n, float* block_max, float* block_min) {
  for (int64_t first = 0, block = 0; first < n; first += kBlock, ++block) {
    const int64_t end = least(first + kBlock, n);
    Vec high = set1(-kInfinity), low = set1(kInfinity);
    for (int64_t i = first; i < end; i += kLanes) {
      // In this order the vector operations drop a NaN.
      const Vec v = load(x + i);
      high = max(v, high);
      low = min(v, low);
    }
    block_max[block] = reduce_max(high);
    block_min[block] = -reduce_max(zero() - low);
  }
}

// Sets the segment's sum and, if kEntropy, its weighted sum.
template <bool kEntropy>
inline void sum_exp(const float* x, int64_t n, float offset, Segment* result) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  Vec weighted[4] = {zero(), zero(), zero(), zero()};
  const Vec shift = set1(offset);
  // Of -inf it makes a number whose exponential is 0 too: 0 times -inf would be NaN. In this order NaN stays.
  const Vec lowest = set1(-200.0f);
  const auto add = [&](int u, Vec v) __attribute__((always_inline)) {
    const Vec shifted = v - shift;
    const Vec weight = exp(shifted);
    sums[u] = sums[u] + weight;
    if constexpr (kEntropy) weighted[u] = fma(max(lowest, shifted), weight, weighted[u]);
  };
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) add(u, load(x + i + u * kLanes));
  }
  for (; i < n; i += kLanes) add(0, load(x + i));
  result->sum = reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if constexpr (kEntropy) result->weighted = reduce_sum((weighted[0] + weighted[1]) + (weighted[2] + weighted[3]));
}

// One segment: `size` logits from `first`; `ranks` gets, by threshold, how many of them exceed it.
Segment read_segment(const Logits& logits, int64_t row, int64_t first, int64_t size, const float* thresholds,
                     int64_t width, int32_t* ranks, bool entropy) {
  alignas(64) float buffer[kSegment];
  float block_max[kSegment / kBlock], block_min[kSegment / kBlock];
  const float* x = as_floats(logits, row, first, size, buffer);
  const int64_t n = (size + kLanes - 1) / kLanes * kLanes;
  block_extremes(x, n, block_max, block_min);

  Segment result{-kInfinity, static_cast<int32_t>(first), 0.0, 0.0};
  int64_t best_block = -1;
  for (int64_t block = 0; block * kBlock < n; ++block) {
    if (block_max[block] > result.max) {
      result.max = block_max[block];
      best_block = block;
    }
  }
  if (best_block >= 0) {
    int64_t i = best_block * kBlock;
    while (x[i] != result.max) ++i;
    result.argmax = static_cast<int32_t>(first + i);
  }
  const float offset = result.max == -kInfinity ? 0.0f : result.max;
  if (entropy) {
    sum_exp<true>(x, n, offset, &result);
  } else {
    sum_exp<false>(x, n, offset, &result);
  }
  if (width == 0) return result;

  const int64_t padded = (width + kThresholdPad - 1) / kThresholdPad * kThresholdPad;
  Vec counts[kSortAbove];
  for (int64_t w = 0; w < width; ++w) {
    counts[w] = zero();
    ranks[w] = 0;
  }
  // ranks[w] first holds what blocks wholly above threshold w add to it and to all that follow.
  for (int64_t start = 0, block = 0; start < size; start += kBlock, ++block) {
    const int64_t low = num_at_least(thresholds, padded, block_max[block]);
    const int64_t high = least(num_at_least(thresholds, padded, block_min[block]), width);
    const int64_t in_block = least(kBlock, size - start);
    if (low < high) {
      const int64_t whole = (in_block + kLanes - 1) / kLanes * kLanes;
      count_above(x + start, whole, thresholds + low, counts + low, high - low);
    }
    if (high < width) ranks[high] += static_cast<int32_t>(in_block);
  }
  int32_t below = 0;
  for (int64_t w = 0; w < width; ++w) {
    below += ranks[w];
    ranks[w] = below + static_cast<int32_t>(reduce_sum(counts[w]));
  }
  return result;
}

void write_padding(const TokenReadingsArgs& args, int64_t row, int64_t valid) {
  for (int64_t w = valid; w < args.width; ++w) {
    args.chosen[row * args.width + w] = 0.0f;
    args.ranks[row * args.width + w] = 0;
  }
}

int64_t num_valid(const TokenReadingsArgs& args, int64_t row) {
  return args.num_token_ids == nullptr ? args.width : args.num_token_ids[row];
}

void gather(const TokenReadingsArgs& args, int64_t row, int64_t valid) {
  const int32_t* ids = args.token_ids + row * args.ids_stride;
  for (int64_t w = 0; w < valid; ++w) args.chosen[row * args.width + w] = logit_at(args.logits, row, ids[w]);
  write_padding(args, row, valid);
}

// The row's chosen logits by descending value; NaN becomes +inf, which nothing exceeds.
void sort_chosen(const TokenReadingsArgs& args, int64_t row, int64_t valid, float* thresholds, int32_t* columns) {
  Chosen chosen[kSortAbove];
  for (int64_t w = 0; w < valid; ++w) {
    const float value = args.chosen[row * args.width + w];
    Chosen item{value == value ? value : kInfinity, static_cast<int32_t>(w)};
    int64_t at = w;
    // Lists are short and often ordered already.
    for (; at > 0 && chosen[at - 1].value < item.value; --at) chosen[at] = chosen[at - 1];
    chosen[at] = item;
  }
  for (int64_t w = 0; w < valid; ++w) {
    thresholds[w] = chosen[w].value;
    columns[w] = chosen[w].column;
  }
}

void join_segments(const TokenReadingsArgs& args, int64_t row, const Segment* segments, int64_t num_segments) {
  const Segment* best = segments;
  for (int64_t s = 1; s < num_segments; ++s) {
    if (segments[s].max > best->max) best = segments + s;
  }
  double sum = 0, weighted = 0;
  bool has_nan = false;
  for (int64_t s = 0; s < num_segments; ++s) {
    has_nan |= segments[s].sum != segments[s].sum;
    if (segments[s].max == -kInfinity) continue;
    const double shift = double(segments[s].max) - double(best->max), scale = ::exp(shift);
    sum += segments[s].sum * scale;
    weighted += (segments[s].weighted + shift * segments[s].sum) * scale;
  }
  args.max[row] = best->max;
  args.argmax[row] = best->argmax;
  args.lse[row] = static_cast<float>(best->max + ::log(sum));
  if (has_nan) args.lse[row] = __builtin_nanf("");
  if (args.entropy == nullptr) return;
  // Both terms are >= 0 but for rounding. When everything is -inf, 0 / 0 makes it NaN.
  const double entropy = ::log(sum) - weighted / sum;
  args.entropy[row] = has_nan ? __builtin_nanf("") : entropy < 0 ? 0.0f : static_cast<float>(entropy);
}

// Ranks from the sorted row. Neighbouring columns often hold neighbouring values (top-k, the whole vocabulary), so
// each search gallops from where the last one ended.
void ranks_by_sort(const TokenReadingsArgs& args, int64_t row, int64_t valid, uint32_t* keys, uint32_t* spare,
                   float* values) {
  const int64_t n = args.logits.vocab;
  const float* x = as_floats(args.logits, row, 0, n, values);
  for (int64_t i = 0; i < n; ++i) keys[i] = descending_key(x[i]);
  const uint32_t* sorted = radix_sort<uint32_t, 0>(keys, spare, n);
  int64_t at = 0;
  for (int64_t w = 0; w < valid; ++w) {
    const uint32_t key = descending_key(args.chosen[row * args.width + w]);
    // Invariant: everything before `low` is less than the key, nothing from `high` on is.
    int64_t low = 0, high = n;
    int64_t step = 1;
    if (sorted[least(at, n - 1)] < key) {
      low = at + 1;
      while (low + step < n && sorted[low + step] < key) low += step + 1, step *= 2;
      high = least(n, low + step);
    } else {
      high = at;
      while (high - step >= 0 && sorted[high - step] >= key) high -= step, step *= 2;
      low = (high > step ? high - step : 0);
    }
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (sorted[middle] < key) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    at = low;
    args.ranks[row * args.width + w] = static_cast<int32_t>(low + 1);
  }
}

}  // namespace

void token_readings(const TokenReadingsArgs& args) {
  const int64_t num_rows = args.logits.rows, n = args.logits.vocab;
  const int64_t num_segments = (n + kSegment - 1) / kSegment;
  const bool sorts = args.width > kSortAbove;
  const int64_t width = sorts ? 0 : args.width;
  const int64_t padded = (width + kThresholdPad - 1) / kThresholdPad * kThresholdPad;
  Scratch<Segment> segments(num_rows * num_segments);
  Scratch<int32_t> counts(num_rows * num_segments * width);
  Scratch<float> thresholds(num_rows * padded);
  Scratch<int32_t> columns(num_rows * width);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t valid = num_valid(args, row);
      gather(args, row, valid);
      if (sorts) continue;
      float* own = thresholds.get() + row * padded;
      sort_chosen(args, row, valid, own, columns.get() + row * width);
      for (int64_t w = valid; w < padded; ++w) own[w] = -kInfinity;
    }
    // Segments rather than rows are shared out: one row keeps every thread busy.
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_rows * num_segments; ++task) {
      const int64_t row = task / num_segments, first = task % num_segments * kSegment;
      segments[task] = read_segment(args.logits, row, first, least(kSegment, n - first),
                                    thresholds.get() + row * padded, sorts ? 0 : num_valid(args, row),
                                    counts.get() + task * width, args.entropy != nullptr);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      join_segments(args, row, segments.get() + row * num_segments, num_segments);
      if (sorts) continue;
      for (int64_t w = 0; w < num_valid(args, row); ++w) {
        int32_t rank = 1;
        for (int64_t s = 0; s < num_segments; ++s) rank += counts[(row * num_segments + s) * width + w];
        args.ranks[row * width + columns[row * width + w]] = rank;
      }
    }
    if (sorts) {
      Scratch<uint32_t> keys(n), spare(n);
      Scratch<float> values(n + kLanes);
#pragma omp for schedule(dynamic)
      for (int64_t row = 0; row < num_rows; ++row) {
        ranks_by_sort(args, row, num_valid(args, row), keys.get(), spare.get(), values.get());
      }
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
