// 16 lanes: AVX-512 F, BW, VL, DQ; conversions to bfloat16 by AVX512_BF16 where the level has it.
#pragma once

#include <immintrin.h>

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kLanes = 16;

struct Vec {
  __m512 v;
};
struct Mask {
  __mmask16 m;
};

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec iota() {
  return {_mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)};
}
inline Mask lanes_below(int n) { return {static_cast<__mmask16>((1u << n) - 1u)}; }

inline __m512 widen_bf16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline __m256i narrow_bf16(__m512 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const BF16* p) { return {widen_bf16(_mm256_loadu_si256((const __m256i*)p))}; }
inline Vec load(const F16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void load_bf16_pair(const BF16* p, Vec* low, Vec* high) {
  const __m512i words = _mm512_loadu_si512(p);
  *low = {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
  *high = {_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Vec load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes_below(n).m, p)}; }
inline Vec load_n(const BF16* p, int n) {
  return {widen_bf16(_mm256_maskz_loadu_epi16(lanes_below(n).m, p))};
}
inline Vec load_n(const F16* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(n).m, p))};
}

inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
// A whole, aligned cache line past the caches; seen by other threads after finish_streams.
constexpr bool kStreamsLines = true;
inline void stream(float* p, Vec x) { _mm512_stream_ps(p, x.v); }
inline void finish_streams() { _mm_sfence(); }
inline void store(BF16* p, Vec x) { _mm256_storeu_si256((__m256i*)p, narrow_bf16(x.v)); }
inline void store(F16* p, Vec x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Masked stores take some CPUs many times as long as whole ones, and what they wrote cannot be loaded at once again.
inline void store_n(float* p, Vec x, int n) {
  if (n == kLanes) return store(p, x);
  _mm512_mask_storeu_ps(p, lanes_below(n).m, x.v);
}
inline void store_n(BF16* p, Vec x, int n) {
  if (n == kLanes) return store(p, x);
  _mm256_mask_storeu_epi16(p, lanes_below(n).m, narrow_bf16(x.v));
}
inline void store_n(F16* p, Vec x, int n) {
  if (n == kLanes) return store(p, x);
  _mm256_mask_storeu_epi16(p, lanes_below(n).m,
                           _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// To infinity or zero where the product is beyond a float; elsewhere it has to be a normal one.
constexpr bool kScaleOverflows = true;
inline Vec scale_by_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline void split_exponent(Vec a, Vec* mantissa, Vec* exponent) {
  mantissa->v = _mm512_getmant_ps(a.v, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const __mmask16 below_one = _mm512_cmp_ps_mask(mantissa->v, _mm512_set1_ps(1.0f), _CMP_LT_OQ);
  const __m512 whole = _mm512_getexp_ps(a.v);
  exponent->v = _mm512_mask_add_ps(whole, below_one, whole, _mm512_set1_ps(1.0f));
}
inline float reduce_sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline float first_lane(Vec a) { return _mm512_cvtss_f32(a.v); }

inline Mask gt(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask ge(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask lt(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask le(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask eq(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.m & b.m)}; }
inline Mask operator|(Mask a, Mask b) { return {static_cast<__mmask16>(a.m | b.m)}; }
inline Mask operator~(Mask a) { return {static_cast<__mmask16>(~a.m)}; }
inline int count(Mask a) { return __builtin_popcount(a.m); }
inline bool any(Mask a) { return a.m != 0; }
inline Vec add_where(Mask m, Vec a, Vec b) { return {_mm512_mask_add_ps(a.v, m.m, a.v, b.v)}; }
inline Vec select(Mask m, Vec a, Vec b) { return {_mm512_mask_mov_ps(b.v, m.m, a.v)}; }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
