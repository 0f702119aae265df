// How many of a row's logits exceed each of many thresholds: one sort of the thresholds, and a search a logit.
//
// Only logits above the lowest threshold are searched for; the others count nowhere. The thresholds are the nodes of a
// binary tree whose levels are in registers. A logit ends in the bucket between two thresholds, and sums over buckets
// are the counts. Without wide shuffles the row's logits are sorted instead.
#pragma once

#include "thresholds.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Beyond so many thresholds a sort of the row is cheaper.
constexpr int64_t kMostSearched = 1020;

// Working memory for rows of up to `n` logits.
struct RowScratch {
  // With n = 0 there is none.
  explicit RowScratch(int64_t n) : floats(padded(n)), kept(padded(n)), words(padded(n)), spare(padded(n)) {}
  Scratch<float> floats, kept;
  Scratch<uint64_t> words, spare;

 private:
  static int64_t padded(int64_t n) { return n > 0 ? n + kMostSearched : 0; }
};

// Descending thresholds, and the column of each; NaN becomes +inf, which nothing exceeds. `words` and `spare` hold
// `num` each.
inline void sort_many_thresholds(const float* values, int64_t num, uint64_t* words, uint64_t* spare, float* thresholds,
                                 int32_t* columns) {
  for (int64_t w = 0; w < num; ++w) {
    const float value = values[w] == values[w] ? values[w] : kInfinity;
    words[w] = static_cast<uint64_t>(descending_key(value)) << 32 | static_cast<uint64_t>(w);
  }
  const uint64_t* sorted = radix_sort<uint64_t, 32, 8>(words, spare, num);
  for (int64_t i = 0; i < num; ++i) {
    columns[i] = static_cast<int32_t>(sorted[i] & 0xffffffffu);
    const float value = values[columns[i]];
    thresholds[i] = value == value ? value : kInfinity;
  }
}

// The floats of `x` that are greater than `limit`, in their order; x holds whole vectors, and `kept` one more than n.
inline int64_t keep_greater(const float* x, int64_t n, float limit, float* kept) {
  int64_t size = 0;
#if defined(__AVX512F__)
  const __m512 least_value = _mm512_set1_ps(limit);
  for (int64_t i = 0; i < n; i += kLanes) {
    const __m512 v = _mm512_loadu_ps(x + i);
    const __mmask16 greater = _mm512_cmp_ps_mask(v, least_value, _CMP_GT_OQ);
    _mm512_storeu_ps(kept + size, _mm512_maskz_compress_ps(greater, v));
    size += __builtin_popcount(greater);
  }
#else
  for (int64_t i = 0; i < n; ++i) {
    kept[size] = x[i];
    size += x[i] > limit;
  }
#endif
  return size;
}

#if defined(__AVX512F__)

// The buckets of up to 255 thresholds.
class ThresholdBuckets {
 public:
  static constexpr int kMostLevels = 8;
  static constexpr int64_t kMost = (1 << kMostLevels) - 1;

  // `num` <= kMost descending thresholds, none of them NaN.
  ThresholdBuckets(const float* thresholds, int64_t num) : num_(static_cast<int>(num)) {
    levels_ = num > 127 ? 8 : num > 63 ? 7 : num > 31 ? 6 : 5;
    for (int level = 0; level < levels_; ++level) {
      for (int code = 0; code < 1 << level; ++code) {
        // In ascending order, what is missing at the end being +inf.
        const int place = (2 * mirrored(code, level) + 1) << (levels_ - 1 - level);
        nodes_[(1 << level) + code] = place <= num_ ? thresholds[num_ - place] : kInfinity;
      }
    }
    std::memset(buckets_, 0, sizeof(buckets_));
  }

  // Counts floats; `x` may be written to up to kBlock after them.
  void add(float* x, int64_t n) {
    for (int64_t i = n; i % kBlock != 0; ++i) x[i] = -kInfinity;
    switch (levels_) {
      case 8: return add_blocks<8>(x, n);
      case 7: return add_blocks<7>(x, n);
      case 6: return add_blocks<6>(x, n);
      default: return add_blocks<5>(x, n);
    }
  }

  // counts[i] = how many floats exceeded the i-th threshold.
  void finish(int32_t* counts) const {
    int32_t above = 0;
    for (int i = 0; i < num_; ++i) {
      // The elements that passed num_ - i thresholds of the ascending order, and no more.
      const int code = mirrored(num_ - i, levels_);
      for (int copy = 0; copy < kCopies; ++copy) above += static_cast<int32_t>(buckets_[copy][code]);
      counts[i] = above;
    }
  }

  static constexpr int64_t kBlock = 64;

 private:
  // A float's next increment of the same bucket would have to wait for the one before.
  static constexpr int kCopies = 4;

  static int mirrored(int code, int bits) {
    int result = 0;
    for (int bit = 0; bit < bits; ++bit) result |= (code >> bit & 1) << (bits - 1 - bit);
    return result;
  }

  __m512 table(int index) const { return _mm512_load_ps(nodes_ + index * kLanes); }
  __m512 pair(int index, __m512i code) const { return _mm512_permutex2var_ps(table(index), code, table(index + 1)); }

  template <int kLevels>
  void add_blocks(const float* x, int64_t n) {
    constexpr int kVectors = kBlock / kLanes;
    alignas(64) float low_levels[4][kLanes] = {};
    for (int level = 0; level < 4; ++level) {
      for (int code = 0; code < 1 << level; ++code) low_levels[level][code] = nodes_[(1 << level) + code];
    }
    const __m512 top = _mm512_set1_ps(nodes_[1]);
    for (int64_t first = 0; first < n; first += kBlock) {
      __m512i code[kVectors];
      __mmask16 fifth[kVectors], sixth[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const __mmask16 side = _mm512_cmp_ps_mask(top, _mm512_loadu_ps(x + first + kLanes * i), _CMP_LT_OQ);
        code[i] = _mm512_maskz_mov_epi32(side, _mm512_set1_epi32(1));
      }
#pragma GCC unroll 8
      for (int level = 1; level < kLevels; ++level) {
        const __m512i bit = _mm512_set1_epi32(1 << level);
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          __m512 node;
          if (level < 4) {
            node = _mm512_permutexvar_ps(code[i], _mm512_load_ps(low_levels[level]));
          } else if (level == 4) {
            node = _mm512_permutexvar_ps(code[i], table(1));
          } else if (level == 5) {
            node = pair(2, code[i]);
          } else if (level == 6) {
            node = _mm512_mask_blend_ps(fifth[i], pair(4, code[i]), pair(6, code[i]));
          } else {
            const __m512 low = _mm512_mask_blend_ps(fifth[i], pair(8, code[i]), pair(10, code[i]));
            const __m512 high = _mm512_mask_blend_ps(fifth[i], pair(12, code[i]), pair(14, code[i]));
            node = _mm512_mask_blend_ps(sixth[i], low, high);
          }
          const __mmask16 side = _mm512_cmp_ps_mask(node, _mm512_loadu_ps(x + first + kLanes * i), _CMP_LT_OQ);
          if (level == 5) fifth[i] = side;
          if (level == 6) sixth[i] = side;
          code[i] = _mm512_mask_add_epi32(code[i], side, code[i], bit);
        }
      }
      alignas(64) uint8_t codes[kBlock];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        _mm_store_si128((__m128i*)(codes + kLanes * i), _mm512_cvtepi32_epi8(code[i]));
      }
#pragma GCC unroll 16
      for (int i = 0; i < kBlock; ++i) ++buckets_[i % kCopies][codes[i]];
    }
  }

  // By level and path, whose lowest bit is the first side taken: those of a level begin at the number of its paths.
  alignas(64) float nodes_[1 << kMostLevels];
  uint32_t buckets_[kCopies][1 << kMostLevels];
  int num_, levels_;
};

// result[i] = how many of `n` floats, whole vectors, exceed the i-th of `num` descending thresholds.
inline void count_in_buckets(const float* x, int64_t n, const float* thresholds, int64_t num, float* kept,
                             int32_t* result) {
  constexpr int64_t kFew = 8;
  for (int64_t first = 0, size; first < num; first += size) {
    size = least(ThresholdBuckets::kMost, num - first);
    if (size <= kFew) {
      Vec counts[kFew];
      for (int64_t w = 0; w < size; ++w) counts[w] = zero();
      count_block(x, n, thresholds + first, counts, size);
      for (int64_t w = 0; w < size; ++w) result[first + w] = static_cast<int32_t>(reduce_sum(counts[w]));
      continue;
    }
    ThresholdBuckets buckets(thresholds + first, size);
    buckets.add(kept, keep_greater(x, n, thresholds[first + size - 1], kept));
    buckets.finish(result + first);
  }
}

#endif

// result[w] = how many of the row's logits exceed values[w].
inline void count_many(const Logits& logits, int64_t row, const float* values, int64_t num, const RowScratch& scratch,
                       int32_t* result) {
  if (num == 0) return;
  const int64_t n = logits.vocab, whole = (n + kLanes - 1) / kLanes * kLanes;
  const float* x = as_floats(logits, row, 0, n, scratch.floats.get());
#if defined(__AVX512F__)
  if (num <= kMostSearched) {
    Scratch<float> thresholds(num);
    Scratch<int32_t> columns(2 * num);
    int32_t* counts = columns.get() + num;
    sort_many_thresholds(values, num, scratch.words.get(), scratch.spare.get(), thresholds.get(), columns.get());
    count_in_buckets(x, whole, thresholds.get(), num, scratch.kept.get(), counts);
    for (int64_t w = 0; w < num; ++w) result[columns[w]] = counts[w];
    return;
  }
#endif
  float lowest = kInfinity;
  for (int64_t w = 0; w < num; ++w) lowest = values[w] < lowest ? values[w] : lowest;
  int64_t above = 0;
  for (int64_t i = 0; i < whole; i += kLanes) above += count(gt(load(x + i), set1(lowest)));
  // Values that count nowhere need not be sorted.
  if (2 * above < n) {
    keep_greater(x, whole, lowest, scratch.kept.get());
    x = scratch.kept.get();
  } else {
    above = n;
  }
  count_by_sort(x, above, values, num, (uint32_t*)scratch.words.get(), (uint32_t*)scratch.spare.get(), result);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
