// GELU, x Phi(x), and its approximation by a hyperbolic tangent.
//
// Include only from kernels/*.cpp.
#pragma once

#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// x / 2 (1 + tanh u) = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3). Below -12 it is less than a float has.
inline Vec gelu_tanh(Vec x) {
  const Vec bounded = max(set1(-12.0f), x);
  // -2u in powers of two.
  const Vec slope = fma(bounded * bounded, set1(-0.10294324f), set1(-2.3022082f));
  return bounded / (set1(1.0f) + exp2(min(set1(127.0f), bounded * slope)));
}

// max(x, 0) - z erfc(z / sqrt 2) / 2 of z = |x|. With t = 1 / (1 + 0.3 s), e^(s s) erfc(s) is t times the minimax
// polynomial in t of relative error 2e-8. Beyond 14 erfc is less than a float has.
inline Vec gelu(Vec x) {
  const Vec positive = max(zero(), x);
  const Vec z = min(set1(14.0f), max(zero() - x, x));
  const Vec t = set1(1.0f) / fma(z, set1(0.21213203f), set1(1.0f));
  Vec p = set1(-0.12952314f);
  p = fma(p, t, set1(0.48556441f));
  p = fma(p, t, set1(-0.51228074f));
  p = fma(p, t, set1(0.54772327f));
  p = fma(p, t, set1(-0.094653134f));
  p = fma(p, t, set1(0.21492717f));
  p = fma(p, t, set1(0.14833886f));
  p = fma(p, t, set1(0.17071527f));
  p = fma(p, t, set1(0.16918800f));
  return positive - set1(0.5f) * z * t * p * exp(set1(-0.5f) * z * z);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
