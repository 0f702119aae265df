// Rows of logits as float vectors, for the kernels that scan a vocabulary. Included inside one instruction set's
// translation unit only: everything is in an anonymous namespace, so that the linker never hands one set's code
// to another.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels_sampling.h"

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float FloatVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

constexpr float kInfinity = __builtin_inff();

inline FloatVec splat(float value) { return value - FloatVec{}; }
inline FloatVec load(const float* p) { return *reinterpret_cast<const FloatVec*>(p); }
inline void store(float* p, FloatVec v) { *reinterpret_cast<FloatVec*>(p) = v; }
// Operands in this order leave the first one where the second is NaN.
inline FloatVec max_vec(FloatVec a, FloatVec b) { return b > a ? b : a; }
inline FloatVec min_vec(FloatVec a, FloatVec b) { return b < a ? b : a; }

inline float max_lane(FloatVec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}
inline float min_lane(FloatVec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] < best ? v[i] : best;
  return best;
}
inline double sum_lanes(FloatVec v) {
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// exp(x) for x <= 0, within 2e-7 of the truth relative to 1; NaN stays NaN, and what is below 2^-126 is about that.
inline FloatVec exp_nonpositive(FloatVec x) {
  FloatVec y = x * 1.44269504088896341f;
#if defined(__AVX512F__)
  y = (FloatVec)_mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)y);
  const __m512 whole = _mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const FloatVec part = y - (FloatVec)whole;
#else
  y = y < -126.0f ? splat(-126.0f) : y;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const FloatVec shifted = y + 12582912.0f;
  const FloatVec part = y - (shifted - 12582912.0f);
#endif
  FloatVec p = part * 0.001326472731307149f + 0.009671512991189957f;
  p = p * part + 0.05550733581185341f;
  p = p * part + 0.24022242426872253f;
  p = p * part + 0.6931470036506653f;
  p = p * part + 1.0f;
#if defined(__AVX512F__)
  return (FloatVec)_mm512_scalef_ps((__m512)p, whole);
#else
  const IntVec scale = ((IntVec)shifted << 23) + 0x3f800000;
  return p * (FloatVec)scale;
#endif
}

inline float half_to_float(uint16_t half) {
  uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  std::memcpy(&bits, &value, 4);
  bits |= (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float bfloat16_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float logit_at(const vllm_cpu::LogitsView& logits, int64_t row, int64_t id) {
  const int64_t at = row * logits.row_stride + id;
  if (logits.type == vllm_cpu::LogitsType::kFloat32) return static_cast<const float*>(logits.data)[at];
  const uint16_t half = static_cast<const uint16_t*>(logits.data)[at];
  return logits.type == vllm_cpu::LogitsType::kBFloat16 ? bfloat16_to_float(half) : half_to_float(half);
}

inline void widen_bfloat16(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = bfloat16_to_float(in[i]);
}

inline void widen_float16(const uint16_t* in, float* out, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
  for (; i < n; ++i) out[i] = half_to_float(in[i]);
}

// Logits [first, first + n) of a row as floats, padded with -inf to whole vectors: in place when they already are,
// else in `buffer`, which holds n floats rounded up to whole vectors.
inline const float* as_floats(const vllm_cpu::LogitsView& logits, int64_t row, int64_t first, int64_t n,
                              float* buffer) {
  const int64_t at = row * logits.row_stride + first;
  if (logits.type == vllm_cpu::LogitsType::kFloat32) {
    const float* in = static_cast<const float*>(logits.data) + at;
    if (n % kLanes == 0) return in;
    std::memcpy(buffer, in, n * sizeof(float));
  } else {
    const uint16_t* in = static_cast<const uint16_t*>(logits.data) + at;
    if (logits.type == vllm_cpu::LogitsType::kBFloat16) {
      widen_bfloat16(in, buffer, n);
    } else {
      widen_float16(in, buffer, n);
    }
  }
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

inline float value_of_key(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key : key ^ 0x7fffffffu;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Memory that is not constructed and not a std::vector, whose code the linker would share between sets.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size) : data_(static_cast<T*>(::operator new(static_cast<size_t>(size > 0 ? size : 1) * sizeof(T)))) {}
  ~Scratch() { ::operator delete(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

// Stable ascending radix sort of the high 32 bits of `n` words, in three passes of 11 bits. Returns the array that
// holds the result: `words` or `spare`.
template <typename Word, int kKeyShift>
inline Word* radix_sort(Word* words, Word* spare, int64_t n) {
  constexpr int kBits = 11, kBuckets = 1 << kBits, kPasses = 3;
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

}  // namespace
