// The k greatest logits of a row, ties by the lower id.
//
// A few are kept sorted in one pass: an element must beat the last of them strictly, and elements come by ascending id,
// so equals stay in the order of their ids. For more, the k-th greatest of the maxima of many parts of the row is a bound
// that k logits reach; only what reaches it is sorted. For a large part of the vocabulary all of the row is.
#pragma once

#include "threshold_search.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int64_t kFewBest = 32;

struct Best {
  float* values;
  int32_t* ids;
  int64_t size, k;

  void insert(float value, int32_t id) {
    int64_t at = size < k ? size++ : k - 1;
    for (; at > 0 && values[at - 1] < value; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
  }
};

inline void best_few(const Logits& logits, int64_t row, int64_t k, float* values, int32_t* ids) {
  alignas(64) float buffer[kSegment];
  Best best{values, ids, 0, k};
  for (int64_t first = 0; first < logits.vocab; first += kSegment) {
    const int64_t size = least(kSegment, logits.vocab - first);
    const float* x = as_floats(logits, row, first, size, buffer);
    int64_t i = 0;
    // Whatever comes first fills the table, a NaN as the least: ids stay distinct and in range.
    for (; best.size < k && i < size; ++i) {
      best.insert(x[i] == x[i] ? x[i] : -kInfinity, static_cast<int32_t>(first + i));
    }
    for (; i < size && i % kLanes != 0; ++i) {
      if (x[i] > values[k - 1]) best.insert(x[i], static_cast<int32_t>(first + i));
    }
    for (; i < size; i += kLanes) {
      if (!any(gt(load(x + i), set1(values[k - 1])))) continue;
      for (int64_t j = i; j < least(i + kLanes, size); ++j) {
        if (x[j] > values[k - 1]) best.insert(x[j], static_cast<int32_t>(first + j));
      }
    }
  }
}

// A word that sorts by descending value.
inline uint64_t word_of(float value, int64_t id) {
  return static_cast<uint64_t>(descending_key(value)) << 32 | static_cast<uint64_t>(id);
}

inline void write_best(const float* x, const uint64_t* sorted, int64_t k, float* values, int32_t* ids) {
  for (int64_t i = 0; i < k; ++i) {
    const int32_t id = static_cast<int32_t>(sorted[i] & 0xffffffffu);
    ids[i] = id;
    values[i] = x[id] == x[id] ? x[id] : -kInfinity;
  }
}

// A value that at least k of the n logits of `x`, whole vectors, reach; -inf if none is found. `keys` and `spare` hold
// a word for each logit.
inline float bound_of_best(const float* x, int64_t n, int64_t k, uint32_t* keys, uint32_t* spare) {
  const int64_t num_vectors = (n + kLanes - 1) / kLanes;
  // Three maxima for each of the k: then little more than k logits reach the k-th.
  const int64_t part = num_vectors * kLanes / (3 * k);
  if (part < 2) return -kInfinity;
  int64_t num_maxima = 0;
  for (int64_t first = 0; first < num_vectors; first += part) {
    Vec highest = set1(-kInfinity);
    // In this order a NaN is dropped.
    for (int64_t i = first; i < least(first + part, num_vectors); ++i) {
      highest = VLLM_ISA::max(load(x + i * kLanes), highest);
    }
    float lanes[kLanes];
    store(lanes, highest);
    for (int lane = 0; lane < kLanes; ++lane) keys[num_maxima++] = descending_key(lanes[lane]);
  }
  const uint32_t key = radix_sort<uint32_t, 0, 8>(keys, spare, num_maxima)[k - 1];
  const uint32_t bits = key & 0x80000000u ? key : key ^ 0x7fffffffu;
  float bound;
  std::memcpy(&bound, &bits, 4);
  return bound;
}

// The ids of the floats that reach `bound`, in order; `ids` holds one vector more than n.
inline int64_t collect(const float* x, int64_t n, float bound, int32_t* ids) {
  int64_t size = 0;
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512 limit = _mm512_set1_ps(bound);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (; i < n; i += kLanes) {
    const __mmask16 reaches = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + i), limit, _CMP_GE_OQ);
    if (reaches == 0) continue;
    const __m512i own = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
    _mm512_storeu_si512(ids + size, _mm512_maskz_compress_epi32(reaches, own));
    size += __builtin_popcount(reaches);
  }
#else
  for (; i < n; i += kLanes) {
    if (!any(ge(load(x + i), set1(bound)))) continue;
    for (int64_t j = i; j < least(i + kLanes, n); ++j) {
      if (x[j] >= bound) ids[size++] = static_cast<int32_t>(j);
    }
  }
#endif
  return size;
}

// The k > 0 greatest; a NaN is the least. `scratch` has memory if k is greater than kFewBest.
inline void best_of_row(const Logits& logits, int64_t row, int64_t k, const RowScratch& scratch, float* values,
                        int32_t* ids) {
  if (k <= kFewBest) return best_few(logits, row, k, values, ids);
  const int64_t n = logits.vocab;
  const float* x = as_floats(logits, row, 0, n, scratch.floats.get());
  uint64_t *words = scratch.words.get(), *spare = scratch.spare.get();
  const float bound = bound_of_best(x, n, k, (uint32_t*)words, (uint32_t*)spare);
  if (bound > -kInfinity) {
    int32_t* reaching = (int32_t*)scratch.kept.get();
    const int64_t size = collect(x, n, bound, reaching);
    for (int64_t i = 0; i < size; ++i) words[i] = word_of(x[reaching[i]], reaching[i]);
    constexpr int64_t kFewWords = 2048;
    const uint64_t* sorted = size <= kFewWords ? radix_sort<uint64_t, 32, 8>(words, spare, size)
                                               : radix_sort<uint64_t, 32>(words, spare, size);
    return write_best(x, sorted, k, values, ids);
  }
  for (int64_t i = 0; i < n; ++i) words[i] = word_of(x[i] == x[i] ? x[i] : -kInfinity, i);
  write_best(x, radix_sort<uint64_t, 32>(words, spare, n), k, values, ids);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
