// One float vector for each instruction-set level, so that a kernel is written once.
//
// Include only from kernels/*.cpp, which are compiled once a level with VLLM_ISA naming the level's namespace. All
// of this lives in that namespace: a function shared between levels would be merged by the linker into whichever
// copy it meets first, wide instructions and all. For the same reason kernels use no std:: containers or algorithms.
//
//   Vec           kLanes floats: zero, set1, load, load_n, store, store_n (float, BF16, F16), + - * /, fma, max, min,
//                 exp, exp2, log, silu, reduce_sum, reduce_max, iota
//   Mask          lanes: gt, ge, lt, le, eq, lanes_below, count, any, select, add_where, operators & | ~
//   load_bf16_pair   kLanes words of two bfloat16 each: the low halves and the high halves
//   load_n/store_n touch only the first n lanes' memory (0 <= n <= kLanes); lanes beyond read as zero.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "dtype.h"

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

namespace vllm_cpu {
namespace VLLM_ISA {

// A lambda has it behind its parameters.
#define VLLM_INLINE __attribute__((always_inline))

// A number that a lambda's `auto` parameter brings as a constant.
template <int N>
struct Constant {
  constexpr operator int() const { return N; }
};

// f(0), ..., f(N - 1) of Constants. An array whose every index is one is registers to all of the compiler's passes; one
// that a loop goes through stays in memory before and after the loop, even if the compiler unrolls that in the end. A
// lambda that takes an int, for none of its types depends on it, is compiled once.
template <typename F, int... I>
[[gnu::always_inline]] inline void unroll_over(const F& f, std::integer_sequence<int, I...>) {
  (f(Constant<I>{}), ...);
}

template <int N, typename F>
[[gnu::always_inline]] inline void unroll(const F& f) {
  unroll_over(f, std::make_integer_sequence<int, N>{});
}

// e^x to about 1 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, n into the exponent. Above the greatest
// finite result it is infinity, and 0 below the least normal one, which some CPUs take many times as long for; NaN stays
// NaN.
inline Vec exp(Vec x) {
  const Vec low = set1(-87.336544f), high = set1(kScaleOverflows ? 200.0f : 88.376259f);
  // The operand order lets NaN pass: on x86 min and max return the second operand then.
  const Vec clamped = min(high, max(low, x));
  const Vec n = round(clamped * set1(1.44269504f));
  // ln 2 in two parts, the first short enough for n times it to be exact.
  Vec r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.3814465e-3f);
  p = fma(p, r, set1(8.3687808e-3f));
  p = fma(p, r, set1(4.1668393e-2f));
  p = fma(p, r, set1(1.6666520e-1f));
  p = fma(p, r, set1(5.0000000e-1f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  const Vec result = scale_by_power_of_two(p, n);
  const Vec above_zero = select(lt(x, low), zero(), result);
  return kScaleOverflows ? above_zero : select(gt(x, high), set1(__builtin_inff()), above_zero);
}

// 2^r for |r| <= 1/2: the polynomial that is the minimax one of relative error.
inline Vec exp2_of_half(Vec r) {
  Vec p = set1(1.53458118e-4f);
  p = fma(p, r, set1(1.33999312e-3f));
  p = fma(p, r, set1(9.61848896e-3f));
  p = fma(p, r, set1(5.55032878e-2f));
  p = fma(p, r, set1(2.40226469e-1f));
  p = fma(p, r, set1(6.93147206e-1f));
  return fma(p, r, set1(1.0f));
}

// 2^x to about 1 ulp for -126 <= x <= 127, 0 below; NaN stays NaN.
inline Vec exp2(Vec x) {
  const Vec low = set1(-126.0f);
  const Vec clamped = max(low, x);
  const Vec n = round(clamped);
  return select(lt(x, low), zero(), scale_by_power_of_two(exp2_of_half(clamped - n), n));
}

// x / (1 + e^-x) to about 2 ulp; for x below -87, where that is less than 1e-35, what a float still has of it or -0. NaN
// stays NaN, and -inf becomes it. e^-x is 2^(r - n) with n = round(x / ln 2), and 1 / ln 2 is in two parts, since the
// first is exact to a float's last bit only.
inline Vec silu(Vec x) {
  const Vec high = set1(87.0f), low = set1(kScaleOverflows ? -200.0f : -87.0f);
  const Vec inverse_ln2 = set1(1.44269504f), minus_inverse_ln2 = set1(-1.44269504f);
  const Vec clamped = min(high, max(low, x));
  const Vec n = round(clamped * inverse_ln2);
  const Vec r = fma(clamped, set1(-1.92596303e-8f), fma(clamped, minus_inverse_ln2, n));
  if constexpr (!kScaleOverflows) x = select(lt(x, low), x * zero(), x);
  return x / (set1(1.0f) + scale_by_power_of_two(exp2_of_half(r), zero() - n));
}

// ln x for normal x > 0, to about 1 ulp. With s = (m - 1) / (m + 1) of the mantissa m in [3/4, 3/2):
// ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...), whose terms beyond s^11 are below a float's last bit.
inline Vec log(Vec x) {
  Vec m, n;
  split_exponent(x, &m, &n);
  const Vec f = m - set1(1.0f);
  const Vec s = f / (m + set1(1.0f));
  const Vec s2 = s * s;
  Vec p = set1(2.0f / 11.0f);
  p = fma(p, s2, set1(2.0f / 9.0f));
  p = fma(p, s2, set1(2.0f / 7.0f));
  p = fma(p, s2, set1(2.0f / 5.0f));
  p = fma(p, s2, set1(2.0f / 3.0f));
  // 2 s = f - s f, and f is exact.
  const Vec tail = fma(p * s2, s, zero() - s * f);
  return fma(n, set1(0.693359375f), fma(n, set1(-2.12194440e-4f), tail) + f);
}

// Row `k` of a packed panel holds 32 columns (see kernels/linear.cpp): columns c and c + 16 for the kLanes columns from
// group * kLanes. In bfloat16 the two share a 32-bit word, so one load and two bit operations widen both.
template <typename T>
inline void load_pair(const T* row, int group, Vec* low, Vec* high) {
  *low = load(row + group * kLanes);
  *high = load(row + 16 + group * kLanes);
}
inline void load_pair(const BF16* row, int group, Vec* low, Vec* high) {
  load_bf16_pair(row + 2 * group * kLanes, low, high);
}

// Scalars go through the same conversions as vectors.
template <typename T>
inline float to_float(T value) {
  return first_lane(load_n(&value, 1));
}

template <typename T>
inline T from_float(float value) {
  T result;
  store_n(&result, set1(value), 1);
  return result;
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
