// Rows of logits as floats, and their sorting, for the kernels that scan a vocabulary. One copy a level, like vec.h.
#pragma once

#include <cstring>

#include "kernels.h"
#include "scratch.h"
#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr float kInfinity = __builtin_inff();

template <typename T>
inline const T* row_of(const Logits& logits, int64_t row) {
  return static_cast<const T*>(logits.data) + row * logits.stride;
}

inline float logit_at(const Logits& logits, int64_t row, int64_t id) {
  VLLM_DISPATCH_DTYPE(logits.dtype, return to_float(row_of<scalar_t>(logits, row)[id]));
  return 0.0f;
}

template <typename T>
inline void widen_all(const T* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(in + i));
  if (i < n) store_n(out + i, load_n(in + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

// Logits [first, first + n) of a row as floats, padded with -inf to whole vectors: in place when they already are,
// else in `buffer`, which holds n floats rounded up to whole vectors.
inline const float* as_floats(const Logits& logits, int64_t row, int64_t first, int64_t n, float* buffer) {
  if (logits.dtype == DType::f32 && n % kLanes == 0) return row_of<float>(logits, row) + first;
  VLLM_DISPATCH_DTYPE(logits.dtype, widen_all(row_of<scalar_t>(logits, row) + first, buffer, n));
  for (; n % kLanes != 0; ++n) buffer[n] = -kInfinity;
  return buffer;
}

// Ascending unsigned keys are descending floats; both zeros have one key.
inline uint32_t descending_key(float value) {
  value += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits & 0x80000000u ? bits : bits ^ 0x7fffffffu;
}

// Stable ascending radix sort of the high 32 bits of `n` words, in passes of kBits: for few words, fewer. Returns the
// array that holds the result: `words` or `spare`.
template <typename Word, int kKeyShift, int kBits = 11>
inline Word* radix_sort(Word* words, Word* spare, int64_t n) {
  constexpr int kBuckets = 1 << kBits, kPasses = (32 + kBits - 1) / kBits;
  uint32_t counts[kPasses][kBuckets];
  std::memset(counts, 0, sizeof(counts));
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = static_cast<uint32_t>(words[i] >> kKeyShift);
    for (int pass = 0; pass < kPasses; ++pass) ++counts[pass][(key >> (pass * kBits)) & (kBuckets - 1)];
  }
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t start = 0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      const uint32_t count = counts[pass][bucket];
      counts[pass][bucket] = start;
      start += count;
    }
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = static_cast<uint32_t>(words[i] >> kKeyShift);
      spare[counts[pass][(key >> (pass * kBits)) & (kBuckets - 1)]++] = words[i];
    }
    Word* sorted = spare;
    spare = words;
    words = sorted;
  }
  return words;
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
