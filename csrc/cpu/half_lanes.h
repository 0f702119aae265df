// Vectors of 32 float16 numbers and the few operations on them: the instructions of AVX512_FP16 or, in a library for tests
// (VLLM_EMULATED), float32 arithmetic with the same results to the bit, for CPUs that lack them. Kernels use no such
// instruction but through these, so that what the emulation computes is what they compute.
//
// Include only from kernels/*.cpp.
#pragma once

#include "vec.h"

#if defined(__AVX512FP16__) || defined(VLLM_EMULATED)
#define VLLM_HAS_HALF_LANES

namespace vllm_cpu {
namespace VLLM_ISA {

#if !defined(VLLM_EMULATED)
using Halves = __m512h;

[[gnu::always_inline]] inline Halves halves_of(__m512i bits) { return _mm512_castsi512_ph(bits); }
[[gnu::always_inline]] inline __m512i bits_of(Halves x) { return _mm512_castph_si512(x); }
[[gnu::always_inline]] inline Halves add(Halves a, Halves b) { return _mm512_add_ph(a, b); }
[[gnu::always_inline]] inline Halves mul(Halves a, Halves b) { return _mm512_mul_ph(a, b); }
[[gnu::always_inline]] inline Halves fma(Halves a, Halves b, Halves c) { return _mm512_fmadd_ph(a, b, c); }
// a 2^n of whole n.
[[gnu::always_inline]] inline Halves scale_by_powers(Halves a, Halves n) { return _mm512_scalef_ph(a, n); }
// Convert 16-bit integers.
[[gnu::always_inline]] inline Halves from_unsigned(__m512i words) { return _mm512_cvtepu16_ph(words); }
[[gnu::always_inline]] inline Halves from_signed(__m512i words) { return _mm512_cvtepi16_ph(words); }
#else
struct Halves {
  __m512i bits;
};

inline Halves halves_of(__m512i bits) { return {bits}; }
inline __m512i bits_of(Halves x) { return x.bits; }

// Numbers 0 to 15 and 16 to 31. Functions of their own: inlined into unrolled kernels they would take minutes to compile.
struct Floats32 {
  __m512 low, high;
};
inline Floats32 widen(Halves x) {
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(x.bits)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x.bits, 1))};
}
// The instructions keep numbers below the smallest normal one, as this conversion does.
inline Halves narrow(Floats32 x) {
  const __m256i low = _mm512_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i high = _mm512_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}

// float32 has 24 bits, two more than twice float16's 11: rounding a sum of two to float32 first changes nothing.
[[gnu::noinline]] inline Halves add(Halves a, Halves b) {
  const Floats32 x = widen(a), y = widen(b);
  return narrow({_mm512_add_ps(x.low, y.low), _mm512_add_ps(x.high, y.high)});
}
// Products are exact in float32.
[[gnu::noinline]] inline Halves mul(Halves a, Halves b) {
  const Floats32 x = widen(a), y = widen(b);
  return narrow({_mm512_mul_ps(x.low, y.low), _mm512_mul_ps(x.high, y.high)});
}

// a b + c rounded to odd: of the two floats around a sum that is none, the one whose last bit is set. With so many bits
// more, rounding it to float16 is as rounding the sum itself.
inline __m512 fma_to_odd(__m512 a, __m512 b, __m512 c) {
  const __m512 product = _mm512_mul_ps(a, b), sum = _mm512_add_ps(product, c);
  // The sum lacks exactly this.
  const __m512 rest = _mm512_sub_ps(sum, product);
  const __m512 lacks = _mm512_add_ps(_mm512_sub_ps(product, _mm512_sub_ps(sum, rest)), _mm512_sub_ps(c, rest));
  const __m512i bits = _mm512_castps_si512(sum), one = _mm512_set1_epi32(1);
  const __mmask16 is_rounded = _mm512_cmp_ps_mask(lacks, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  const __mmask16 is_even = _mm512_testn_epi32_mask(bits, one);
  // Away from zero where what it lacks has its sign.
  const __mmask16 is_less = _mm512_movepi32_mask(_mm512_xor_si512(bits, _mm512_castps_si512(lacks)));
  const __m512i nearer = _mm512_mask_sub_epi32(_mm512_add_epi32(bits, one), is_less, bits, one);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, is_rounded & is_even, nearer));
}
[[gnu::noinline]] inline Halves fma(Halves a, Halves b, Halves c) {
  const Floats32 x = widen(a), y = widen(b), z = widen(c);
  return narrow({fma_to_odd(x.low, y.low, z.low), fma_to_odd(x.high, y.high, z.high)});
}
inline Halves scale_by_powers(Halves a, Halves n) {
  const Floats32 x = widen(a), powers = widen(n);
  return narrow({_mm512_scalef_ps(x.low, powers.low), _mm512_scalef_ps(x.high, powers.high)});
}
[[gnu::noinline]] inline Halves from_unsigned(__m512i words) {
  return narrow({_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words))),
                 _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)))});
}
[[gnu::noinline]] inline Halves from_signed(__m512i words) {
  return narrow({_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(words))),
                 _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(words, 1)))});
}
#endif

inline Halves load_halves(const _Float16* p) { return halves_of(_mm512_loadu_si512(p)); }
inline void store_halves(_Float16* p, Halves x) { _mm512_storeu_si512(p, bits_of(x)); }
inline Halves repeat_half(_Float16 x) {
  int16_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return halves_of(_mm512_set1_epi16(bits));
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
