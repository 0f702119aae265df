// 8-bit floats in the key/value cache: E4M3 without infinities, and E5M2. Reading one is exact; writing rounds to the
// nearest, ties to even, and what is beyond the greatest finite value becomes that. NaN stays NaN.
#pragma once

#include <cstring>

#include "dtype.h"
#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Convert an element as it is written to a cache of T.
template <typename F>
struct Float8Traits;
template <>
struct Float8Traits<E4M3> {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr float kMost = 448.0f, kLeastNormal = 0x1p-6f, kUnit = 0x1p14f;
};
template <>
struct Float8Traits<E5M2> {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr float kMost = 57344.0f, kLeastNormal = 0x1p-14f, kUnit = 0x1p7f;
};

// Bytes of float16 whose values are those of the codes, of E4M3 a 256th: the sign, a zero, and the rest.
#if defined(__AVX512F__)
inline Vec of_words(__m256i words) { return {_mm512_cvtph_ps(words)}; }
inline __m256i upper_bytes(const void* p) {
  return _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
}
inline Vec load_raw(const E5M2* p) { return of_words(upper_bytes(p)); }
inline Vec load_raw(const E4M3* p) {
  return of_words(_mm256_and_si256(_mm256_srai_epi16(upper_bytes(p), 1), _mm256_set1_epi16(static_cast<short>(0xbfff))));
}
#elif defined(__AVX2__)
inline Vec of_words(__m128i words) { return {_mm256_cvtph_ps(words)}; }
inline __m128i upper_bytes(const void* p) {
  return _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)p));
}
inline Vec load_raw(const E5M2* p) { return of_words(upper_bytes(p)); }
inline Vec load_raw(const E4M3* p) {
  return of_words(_mm_and_si128(_mm_srai_epi16(upper_bytes(p), 1), _mm_set1_epi16(static_cast<short>(0xbfff))));
}
#else
inline Vec load_raw(const E5M2* p) {
  F16 words[kLanes];
  for (int i = 0; i < kLanes; ++i) words[i].bits = static_cast<uint16_t>(p[i].bits << 8);
  return load(words);
}
inline Vec load_raw(const E4M3* p) {
  F16 words[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    words[i].bits = static_cast<uint16_t>((p[i].bits & 0x80) << 8 | (p[i].bits & 0x7f) << 7);
  }
  return load(words);
}
#endif

inline Vec load(const E5M2* p) { return load_raw(p); }
inline Vec load(const E4M3* p) {
  const Vec x = load_raw(p) * set1(256.0f);
  // 480 is NaN.
  return select(gt(max(x, zero() - x), set1(448.0f)), set1(__builtin_nanf("")), x);
}

template <typename F>
inline Vec load_codes_n(const F* p, int n) {
  if (n == kLanes) return load(p);
  F lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(F));
  return load(lanes);
}
inline Vec load_n(const E4M3* p, int n) { return load_codes_n(p, n); }
inline Vec load_n(const E5M2* p, int n) { return load_codes_n(p, n); }

// Without branches, so that the compiler makes vectors of it.
template <typename F>
inline uint8_t code_of(float x) {
  using Traits = Float8Traits<F>;
  constexpr int kShift = 23 - Traits::kMantissa;
  uint32_t bits, rounded, unit;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof(bits));
  const bool is_nan = bits > 0x7f800000;
  magnitude = magnitude > Traits::kMost ? Traits::kMost : magnitude;
  std::memcpy(&rounded, &magnitude, sizeof(rounded));
  rounded += (1u << (kShift - 1)) - 1 + (rounded >> kShift & 1);
  const uint32_t normal = (rounded >> kShift) - (static_cast<uint32_t>(127 - Traits::kBias) << Traits::kMantissa);
  // The last bit of this sum is the least value that is not 0.
  const float shifted = magnitude + Traits::kUnit, base = Traits::kUnit;
  uint32_t subnormal;
  std::memcpy(&subnormal, &shifted, sizeof(subnormal));
  std::memcpy(&unit, &base, sizeof(unit));
  const uint32_t code = magnitude < Traits::kLeastNormal ? subnormal - unit : normal;
  return static_cast<uint8_t>(sign | (is_nan ? 0x7f : code));
}

// out[i * stride] = the code of x[i] / scale.
template <typename F, typename T>
inline void store_codes(const T* x, float scale, int64_t size, F* out, int64_t stride) {
  constexpr int64_t kPiece = 64;
  float values[kPiece];
  uint8_t codes[kPiece];
  const Vec divisor = set1(scale);
  for (int64_t begin = 0; begin < size; begin += kPiece) {
    const int64_t count = size - begin < kPiece ? size - begin : kPiece;
    for (int64_t i = 0; i < count; i += kLanes) {
      const int n = static_cast<int>(count - i < kLanes ? count - i : kLanes);
      store_n(values + i, load_n(x + begin + i, n) / divisor, n);
    }
    for (int64_t i = 0; i < count; ++i) codes[i] = code_of<F>(values[i]);
    if (stride == 1) {
      std::memcpy(out + begin, codes, count);
    } else {
      for (int64_t i = 0; i < count; ++i) out[(begin + i) * stride].bits = codes[i];
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
