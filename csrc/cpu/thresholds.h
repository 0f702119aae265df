// How many of a row's logits exceed each of W thresholds: W comparisons an element, if one does not look closer.
//
// Among the sorted thresholds, a block of elements needs only those between its minimum and its maximum; above them
// nothing counts, below them everything does. Where many remain, a block is searched instead (threshold_tree.h).
// Beyond kManyAbove thresholds threshold_search.h is cheaper.
#pragma once

#include "logits.h"
#include "threshold_tree.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Logits that stay in the first-level cache while they are looked at several times.
constexpr int64_t kSegment = 4096;
constexpr int64_t kManyAbove = kLanes == 16 ? 128 : 192;
// Threshold arrays are padded to this, so that they are compared by whole vectors.
constexpr int64_t kThresholdPad = 16;

inline int64_t padded_thresholds(int64_t width) { return (width + kThresholdPad - 1) / kThresholdPad * kThresholdPad; }

// Extremes of each block of a segment.
struct BlockExtremes {
  float max[kSegment / kBlock], min[kSegment / kBlock];

  BlockExtremes(const float* x, int64_t n) {
    for (int64_t first = 0, block = 0; first < n; first += kBlock, ++block) {
      const int64_t end = least(first + kBlock, n);
      Vec high[2] = {set1(-kInfinity), set1(-kInfinity)}, low[2] = {set1(kInfinity), set1(kInfinity)};
      const auto add = [&](int u, Vec v) __attribute__((always_inline)) {
        // In this order the vector operations drop a NaN.
        high[u] = VLLM_ISA::max(v, high[u]);
        low[u] = VLLM_ISA::min(v, low[u]);
      };
      int64_t i = first;
      for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
        add(0, load(x + i));
        add(1, load(x + i + kLanes));
      }
      for (; i < end; i += kLanes) add(0, load(x + i));
      max[block] = reduce_max(VLLM_ISA::max(high[0], high[1]));
      min[block] = -reduce_max(zero() - VLLM_ISA::min(low[0], low[1]));
    }
  }
};

// Adds to each lane of counts[g] how many of the elements exceed thresholds[g], for G of them. Floats count exactly
// up to 2^24 elements a lane. Fewer than four sums would wait for each other's additions, so few thresholds have
// several.
template <int G>
inline void count_group(const float* x, int64_t n, const float* thresholds, Vec* counts) {
  constexpr int kSums = G < 4 ? 4 / G : 1;
  Vec sums[kSums][G], limit[G];
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    limit[g] = set1(thresholds[g]);
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) sums[s][g] = s == 0 ? counts[g] : zero();
  }
  const Vec one = set1(1.0f);
  const auto add = [&](int s, Vec v) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) sums[s][g] = add_where(gt(v, limit[g]), sums[s][g], one);
  };
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes) {
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) add(s, load(x + i + s * kLanes));
  }
  for (; i < n; i += kLanes) add(0, load(x + i));
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g) {
    counts[g] = sums[0][g];
#pragma GCC unroll 4
    for (int s = 1; s < kSums; ++s) counts[g] = counts[g] + sums[s][g];
  }
}

inline void count_block(const float* x, int64_t n, const float* thresholds, Vec* counts, int64_t width) {
  constexpr int kGroup = kLanes == 16 ? 8 : 4;
  int64_t w = 0;
  for (; w + kGroup <= width; w += kGroup) count_group<kGroup>(x, n, thresholds + w, counts + w);
  for (; w + 4 <= width; w += 4) count_group<4>(x, n, thresholds + w, counts + w);
  for (; w + 2 <= width; w += 2) count_group<2>(x, n, thresholds + w, counts + w);
  for (; w < width; ++w) count_group<1>(x, n, thresholds + w, counts + w);
}

// How many of the padded thresholds are >= value.
inline int64_t num_at_least(const float* thresholds, int64_t padded, float value) {
  int64_t result = 0;
  for (int64_t w = 0; w < padded; w += kLanes) result += count(ge(load(thresholds + w), set1(value)));
  return result;
}

// Counts, over segments of a row, how many logits exceed each of a row's thresholds.
class ThresholdCounts {
 public:
  // `thresholds` descend and are padded with -inf; 0 <= width <= kManyAbove.
  ThresholdCounts(const float* thresholds, int64_t width)
      : thresholds_(thresholds), width_(width), padded_(padded_thresholds(width)) {
    for (int64_t w = 0; w < width; ++w) {
      counts_[w] = zero();
      exceeded_from_[w] = 0;
    }
    for (int64_t first = 0, tree = 0; first < width; first += ThresholdTree::kMost, ++tree) {
      trees_[tree].plant(thresholds + first, least(ThresholdTree::kMost, width - first));
    }
  }

  bool is_empty() const { return width_ == 0; }

  // A segment of `size` logits, padded with -inf to whole vectors. Fetches every second line of as much from `next`.
  void add(const float* x, int64_t size, const BlockExtremes& blocks, const float* next) {
    if (is_empty()) return;
    for (int64_t start = 0, block = 0; start < size; start += kBlock, ++block) {
      for (int64_t line = 0; line < kBlock; line += 32) __builtin_prefetch(next + start + line, 0, 2);
      const int64_t low = num_at_least(thresholds_, padded_, blocks.max[block]);
      const int64_t high = least(num_at_least(thresholds_, padded_, blocks.min[block]), width_);
      const int64_t in_block = least(kBlock, size - start);
      const int64_t rest = low < high ? count(x + start, in_block, low, high) : high;
      if (rest < width_) exceeded_from_[rest] += static_cast<int32_t>(in_block);
    }
  }

  // result[w] = how many of the logits exceeded thresholds[w].
  void finish(int32_t* result) {
    int32_t below = 0;
    for (int64_t w = 0; w < width_; ++w) {
      below += exceeded_from_[w];
      result[w] = below + static_cast<int32_t>(reduce_sum(counts_[w]));
    }
    for (int64_t first = 0, tree = 0; first < width_; first += ThresholdTree::kMost, ++tree) {
      trees_[tree].finish(result + first);
    }
  }

 private:
  // A block, for the thresholds from `low` to `high`, which some logits exceed and others do not. Returns from which
  // threshold on nothing has been counted, at least `high`.
  int64_t count(const float* x, int64_t size, int64_t low, int64_t high) {
    const int64_t whole = (size + kLanes - 1) / kLanes * kLanes;
    int64_t end = low;
    for (int64_t first = low; first < high; first = end) {
      const int64_t tree = first / ThresholdTree::kMost;
      const int64_t tree_end = least((tree + 1) * ThresholdTree::kMost, width_);
      end = least(tree_end, high);
      if (size == kBlock && trees_[tree].pays(end - first)) {
        trees_[tree].add_block(x);
        end = tree_end;
      } else {
        count_block(x, whole, thresholds_ + first, counts_ + first, end - first);
      }
    }
    return end;
  }

  const float* thresholds_;
  int64_t width_, padded_;
  Vec counts_[kManyAbove];
  int32_t exceeded_from_[kManyAbove];  // logits of blocks that exceed this threshold and all that follow
  ThresholdTree trees_[(kManyAbove + ThresholdTree::kMost - 1) / ThresholdTree::kMost];
};

// Rows of segments in pieces that threads take in turn: whole rows where they are many, and enough to keep every thread
// busy where they are few.
struct Pieces {
  int64_t per_row = 1, num_segments;

  Pieces(int64_t num_rows, int64_t num_segments) : num_segments(num_segments) {
    const int64_t threads = max_threads();
    while (per_row < num_segments && num_rows * per_row % threads != 0 && num_rows * per_row < 16 * threads) ++per_row;
  }

  int64_t first_segment(int64_t piece) const { return piece * num_segments / per_row; }
};

// The first `valid` of `values` as descending thresholds, padded with -inf to `padded`, and the column of each; NaN
// becomes +inf, which nothing exceeds. valid <= kManyAbove.
inline void sort_thresholds(const float* values, int64_t valid, int64_t padded, float* thresholds, int32_t* columns) {
  constexpr int64_t kFew = 2 * kThresholdPad;
  if (padded <= kFew) {
    // Each one's place is the number of those before it.
    float own[kFew];
    for (int64_t w = 0; w < padded; ++w) own[w] = thresholds[w] = -kInfinity;
    for (int64_t w = 0; w < valid; ++w) own[w] = values[w] == values[w] ? values[w] : kInfinity;
    for (int64_t w = 0; w < valid; ++w) {
      const Vec value = set1(own[w]);
      int64_t place = 0;
      for (int64_t first = 0; first < padded; first += kLanes) {
        const Vec others = load(own + first);
        const int earlier = static_cast<int>(w <= first ? 0 : least(kLanes, w - first));
        place += count(gt(others, value) | (eq(others, value) & lanes_below(earlier)));
      }
      thresholds[place] = own[w];
      columns[place] = static_cast<int32_t>(w);
    }
    return;
  }
  for (int64_t w = 0; w < valid; ++w) {
    const float value = values[w] == values[w] ? values[w] : kInfinity;
    int64_t at = w;
    // Lists are short and often ordered already.
    for (; at > 0 && thresholds[at - 1] < value; --at) {
      thresholds[at] = thresholds[at - 1];
      columns[at] = columns[at - 1];
    }
    thresholds[at] = value;
    columns[at] = static_cast<int32_t>(w);
  }
  for (int64_t w = valid; w < padded; ++w) thresholds[w] = -kInfinity;
}

// result[w] = how many of `n` floats exceed values[w], by sorting them, which takes as many `keys` and `spare`.
// Neighbouring columns often hold neighbouring values (top-k, the whole vocabulary), so each search gallops from where
// the last one ended.
inline void count_by_sort(const float* x, int64_t n, const float* values, int64_t valid, uint32_t* keys,
                          uint32_t* spare, int32_t* result) {
  if (n == 0) {
    for (int64_t w = 0; w < valid; ++w) result[w] = 0;
    return;
  }
  for (int64_t i = 0; i < n; ++i) keys[i] = descending_key(x[i]);
  const uint32_t* sorted = radix_sort<uint32_t, 0>(keys, spare, n);
  int64_t at = 0;
  for (int64_t w = 0; w < valid; ++w) {
    const uint32_t key = descending_key(values[w]);
    // Invariant: everything before `low` is less than the key, nothing from `high` on is.
    int64_t low = 0, high = n;
    int64_t step = 1;
    if (sorted[at] < key) {
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
    at = least(low, n - 1);
    result[w] = static_cast<int32_t>(low);
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
