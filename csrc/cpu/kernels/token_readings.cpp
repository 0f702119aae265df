// Chosen logits, their true ranks, log-sum-exp, argmax and, if asked, entropy of rows of logits, in one pass over
// memory.
//
// A row is read in segments of fixed size that stay in the first-level cache while they are looked at three times:
// for the maximum, for the sum of exponentials, for the ranks. A segment's results do not depend on the number of
// threads or on the other rows, and segments are joined in order, so neither do a row's.
//
// The ranks are the dear part; see thresholds.h.
#include <math.h>
#include <string.h>

#include "../thresholds.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

struct Segment {
  float max;
  int32_t argmax;
  double sum;  // of exp(x - max), or of about 0 when the maximum is -inf; NaN if there is a NaN
  double weighted;  // the sum of (x - max) * exp(x - max), if asked
};

// Sets the segment's sum and, if kEntropy, its weighted sum; fetches as many bytes as it reads from `next`, or every
// second line of them if kHalf.
template <bool kEntropy, bool kHalf>
inline void sum_exp(const float* x, int64_t n, float offset, const float* next, Segment* result) {
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
    for (int line = 0; line < 4 * kLanes; line += kHalf ? 32 : 16) __builtin_prefetch(next + i + line, 0, 2);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) add(u, load(x + i + u * kLanes));
  }
  for (; i < n; i += kLanes) add(0, load(x + i));
  result->sum = reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if constexpr (kEntropy) result->weighted = reduce_sum((weighted[0] + weighted[1]) + (weighted[2] + weighted[3]));
}

// One segment: `size` logits from `first`, which are also counted.
Segment read_segment(const Logits& logits, int64_t row, int64_t first, int64_t size, ThresholdCounts* counts,
                     bool entropy) {
  alignas(64) float buffer[kSegment];
  const float* x = as_floats(logits, row, first, size, buffer);
  const int64_t n = (size + kLanes - 1) / kLanes * kLanes;
  const BlockExtremes blocks(x, n);

  Segment result{-kInfinity, static_cast<int32_t>(first), 0.0, 0.0};
  int64_t best_block = -1;
  for (int64_t block = 0; block * kBlock < n; ++block) {
    if (blocks.max[block] > result.max) {
      result.max = blocks.max[block];
      best_block = block;
    }
  }
  if (best_block >= 0) {
    int64_t i = best_block * kBlock;
    while (!any(eq(load(x + i), set1(result.max)))) i += kLanes;
    while (x[i] != result.max) ++i;
    result.argmax = static_cast<int32_t>(first + i);
  }
  const float offset = result.max == -kInfinity ? 0.0f : result.max;
  // The next segment comes from memory while this one is worked on, instead of after it.
  const float* next = x == buffer ? x : x + kSegment;
  if (entropy) {
    sum_exp<true, false>(x, n, offset, next, &result);
  } else if (counts->is_empty()) {
    sum_exp<false, false>(x, n, offset, next, &result);
  } else {
    sum_exp<false, true>(x, n, offset, next, &result);
  }
  counts->add(x, size, blocks, next + 16);
  return result;
}

void write_padding(const TokenReadingsArgs& args, int64_t row, int64_t valid) {
  for (int64_t w = valid; w < args.width; ++w) {
    args.chosen[row * args.width + w] = args.logprobs[row * args.width + w] = 0.0f;
    args.ranks[row * args.width + w] = 0;
  }
}

// Columns that are neither gathered nor counted: the argmax needs neither.
int64_t lead_of(const TokenReadingsArgs& args) { return args.columns == nullptr ? 0 : 1; }

int64_t num_valid(const TokenReadingsArgs& args, int64_t row) {
  return args.num_token_ids == nullptr ? args.width : args.num_token_ids[row];
}

void gather(const TokenReadingsArgs& args, int64_t row, int64_t valid) {
  const int32_t* ids = args.token_ids + row * args.ids_stride;
  for (int64_t w = lead_of(args); w < valid; ++w) args.chosen[row * args.width + w] = logit_at(args.logits, row, ids[w]);
  write_padding(args, row, valid);
}

// The first column, once the argmax is known: nothing is greater than the greatest.
void put_argmax(const TokenReadingsArgs& args, int64_t row) {
  int32_t* columns = args.columns + row * args.width;
  memcpy(columns, args.token_ids + row * args.ids_stride, args.width * sizeof(int32_t));
  columns[0] = args.argmax[row];
  args.chosen[row * args.width] = args.max[row];
  args.ranks[row * args.width] = 1;
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

// What one thread reads of a row at a time: counts of `columns` thresholds, in the order of the columns.
void read_piece(const TokenReadingsArgs& args, const Pieces& pieces, int64_t row, int64_t piece, int64_t columns,
                Segment* segments, int32_t* counts) {
  const int64_t n = args.logits.vocab, lead = lead_of(args);
  alignas(64) float thresholds[kSortAbove + kThresholdPad];
  int32_t order[kSortAbove], ordered[kSortAbove];
  sort_thresholds(args.chosen + row * args.width + lead, columns, padded_thresholds(columns), thresholds, order);
  ThresholdCounts exceeding(thresholds, columns);
  for (int64_t s = pieces.first_segment(piece); s < pieces.first_segment(piece + 1); ++s) {
    const int64_t first = s * kSegment, size = least(kSegment, n - first);
    segments[s] = read_segment(args.logits, row, first, size, &exceeding, args.entropy != nullptr);
  }
  exceeding.finish(ordered);
  for (int64_t w = 0; w < columns; ++w) counts[order[w]] = ordered[w];
}

// `counts`: of each piece, `columns` of them `stride` apart.
void finish_row(const TokenReadingsArgs& args, const Pieces& pieces, int64_t row, int64_t columns,
                const Segment* segments, const int32_t* counts, int64_t stride) {
  join_segments(args, row, segments, pieces.num_segments);
  if (args.columns != nullptr) put_argmax(args, row);
  const int64_t start = row * args.width, lead = lead_of(args);
  for (int64_t w = 0; w < num_valid(args, row); ++w) args.logprobs[start + w] = args.chosen[start + w] - args.lse[row];
  for (int64_t w = 0; w < columns; ++w) {
    int32_t rank = 1;
    for (int64_t p = 0; p < pieces.per_row; ++p) rank += counts[p * stride + w];
    args.ranks[start + lead + w] = rank;
  }
}

// Of each row its ids, logprobs, logits and ranks, log-sum-exp and entropy (NaN where it was not asked for).
void write_table(const TokenReadingsArgs& args) {
  const int64_t width = args.width, bytes = width * int64_t{sizeof(int32_t)};
  for (int64_t row = 0; row < args.logits.rows; ++row) {
    int32_t* out = args.table + row * (4 * width + 2);
    const int32_t* ids = args.columns == nullptr ? args.token_ids + row * args.ids_stride : args.columns + row * width;
    memcpy(out, ids, bytes);
    memcpy(out + width, args.logprobs + row * width, bytes);
    memcpy(out + 2 * width, args.chosen + row * width, bytes);
    memcpy(out + 3 * width, args.ranks + row * width, bytes);
    const float entropy = args.entropy == nullptr ? __builtin_nanf("") : args.entropy[row];
    memcpy(out + 4 * width, args.lse + row, sizeof(float));
    memcpy(out + 4 * width + 1, &entropy, sizeof(float));
  }
}

void rank_by_sort(const TokenReadingsArgs& args) {
  const int64_t n = args.logits.vocab, lead = lead_of(args);
#pragma omp parallel
  {
    Scratch<uint32_t> keys(n), spare(n);
    Scratch<float> values(n + kLanes);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < args.logits.rows; ++row) {
      const int64_t others = num_valid(args, row) - lead, first = row * args.width + lead;
      count_by_sort(args.logits, row, args.chosen + first, others, keys.get(), spare.get(), values.get(),
                    args.ranks + first);
      for (int64_t w = 0; w < others; ++w) ++args.ranks[first + w];
    }
  }
}

}  // namespace

void token_readings(const TokenReadingsArgs& args) {
  const int64_t num_rows = args.logits.rows;
  const Pieces pieces(num_rows, (args.logits.vocab + kSegment - 1) / kSegment);
  const int64_t lead = lead_of(args), asked = args.width - lead;
  const bool sorts = asked > kSortAbove, is_shared = pieces.per_row > 1;
  const int64_t width = sorts ? 0 : asked;
  Scratch<Segment> segments(num_rows * pieces.num_segments);
  Scratch<int32_t> counts(is_shared ? num_rows * pieces.per_row * width : 0);
  const auto num_counted = [&](int64_t row) { return sorts ? 0 : num_valid(args, row) - lead; };
  const auto finish = [&](int64_t row, const int32_t* own) {
    finish_row(args, pieces, row, num_counted(row), segments.get() + row * pieces.num_segments, own, width);
  };
#pragma omp parallel
  {
    if (is_shared) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row) gather(args, row, num_valid(args, row));
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_rows * pieces.per_row; ++task) {
      const int64_t row = task / pieces.per_row;
      int32_t own[kSortAbove];
      if (!is_shared) gather(args, row, num_valid(args, row));
      read_piece(args, pieces, row, task % pieces.per_row, num_counted(row),
                 segments.get() + row * pieces.num_segments, is_shared ? counts.get() + task * width : own);
      if (!is_shared) finish(row, own);
    }
    if (is_shared) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row) finish(row, counts.get() + row * pieces.per_row * width);
    }
  }
  if (sorts) rank_by_sort(args);
  if (args.table != nullptr) write_table(args);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
