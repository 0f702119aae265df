// 8 lanes: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kLanes = 8;

struct Vec {
  __m256 v;
};
struct Mask {
  __m256 m;
};

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec iota() { return {_mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0)}; }
inline __m256i lane_bits_below(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}
inline Mask lanes_below(int n) { return {_mm256_castsi256_ps(lane_bits_below(n))}; }

inline __m256 widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m128i narrow_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  return _mm256_castsi256_si128(packed);
}
inline __m128i load_halves_n(const void* p, int n) {
  alignas(16) uint16_t lanes[8] = {};
  std::memcpy(lanes, p, 2 * n);
  return _mm_load_si128((const __m128i*)lanes);
}
inline void store_halves_n(void* p, __m128i x, int n) {
  alignas(16) uint16_t lanes[8];
  _mm_store_si128((__m128i*)lanes, x);
  std::memcpy(p, lanes, 2 * n);
}

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const BF16* p) { return {widen_bf16(_mm_loadu_si128((const __m128i*)p))}; }
inline Vec load(const F16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
inline void load_bf16_pair(const BF16* p, Vec* low, Vec* high) {
  const __m256i words = _mm256_loadu_si256((const __m256i*)p);
  *low = {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
  *high = {_mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Vec load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lane_bits_below(n))}; }
inline Vec load_n(const BF16* p, int n) { return n == kLanes ? load(p) : Vec{widen_bf16(load_halves_n(p, n))}; }
inline Vec load_n(const F16* p, int n) { return n == kLanes ? load(p) : Vec{_mm256_cvtph_ps(load_halves_n(p, n))}; }

inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
// A vector is less than a cache line, and parts of lines are not worth writing past the caches.
constexpr bool kStreamsLines = false;
inline void stream(float* p, Vec x) { store(p, x); }
inline void finish_streams() {}
inline void store(BF16* p, Vec x) { _mm_storeu_si128((__m128i*)p, narrow_bf16(x.v)); }
inline void store(F16* p, Vec x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Masked stores take some CPUs many times as long as whole ones, and what they wrote cannot be loaded at once again.
inline void store_n(float* p, Vec x, int n) {
  if (n == kLanes) return store(p, x);
  _mm256_maskstore_ps(p, lane_bits_below(n), x.v);
}
inline void store_n(BF16* p, Vec x, int n) {
  if (n == kLanes) return store(p, x);
  store_halves_n(p, narrow_bf16(x.v), n);
}
inline void store_n(F16* p, Vec x, int n) {
  if (n == kLanes) return store(p, x);
  store_halves_n(p, _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), n);
}

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// The product has to be a normal float.
constexpr bool kScaleOverflows = false;
inline Vec scale_by_power_of_two(Vec a, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), exponent))};
}
inline void split_exponent(Vec a, Vec* mantissa, Vec* exponent) {
  const __m256i bits = _mm256_castps_si256(a.v), three_quarters = _mm256_set1_epi32(0x3f400000);
  const __m256i whole = _mm256_srai_epi32(_mm256_sub_epi32(bits, three_quarters), 23);
  mantissa->v = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(whole, 23)));
  exponent->v = _mm256_cvtepi32_ps(whole);
}
inline float reduce_sum(Vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline float reduce_max(Vec a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
inline float first_lane(Vec a) { return _mm256_cvtss_f32(a.v); }

inline Mask gt(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask ge(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask lt(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask le(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask eq(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.m, b.m)}; }
inline Mask operator|(Mask a, Mask b) { return {_mm256_or_ps(a.m, b.m)}; }
inline Mask operator~(Mask a) {
  return {_mm256_castsi256_ps(_mm256_xor_si256(_mm256_castps_si256(a.m), _mm256_set1_epi32(-1)))};
}
inline int count(Mask a) { return __builtin_popcount(_mm256_movemask_ps(a.m)); }
inline bool any(Mask a) { return _mm256_movemask_ps(a.m) != 0; }
inline Vec add_where(Mask m, Vec a, Vec b) { return {_mm256_add_ps(a.v, _mm256_and_ps(m.m, b.v))}; }
inline Vec select(Mask m, Vec a, Vec b) { return {_mm256_blendv_ps(b.v, a.v, m.m)}; }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
