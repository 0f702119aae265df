// Functions of gates on vectors, one copy a level like vec.h.
#pragma once

#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

// ln(1 + e^x) = max(x, 0) + ln(1 + e), e = e^-|x|; a series where 1 + e would lose e's digits. Elsewhere e divided by what
// 1 + e has of it makes up for those that are lost: decays of long memories follow from small steps.
inline Vec softplus(Vec x) {
  const Vec e = exp(min(x, zero() - x));
  const Vec series = e * fma(e, fma(e, set1(1.0f / 3.0f), set1(-0.5f)), set1(1.0f));
  const Vec above = set1(1.0f) + e;
  const Vec tail = select(lt(e, set1(0.004f)), series, log(above) * (e / (above - set1(1.0f))));
  return max(x, zero()) + tail;
}

// tanh x to about 4 ulp: its series near 0, (1 - e^-2|x|) / (1 + e^-2|x|) elsewhere.
inline Vec tanh(Vec x) {
  const Vec magnitude = max(x, zero() - x), square = x * x;
  const Vec shrunk = exp2(magnitude * set1(-2.88539008f)), one = set1(1.0f);
  const Vec far = (one - shrunk) / (one + shrunk);
  Vec p = set1(62.0f / 2835.0f);
  p = fma(p, square, set1(-17.0f / 315.0f));
  p = fma(p, square, set1(2.0f / 15.0f));
  p = fma(p, square, set1(-1.0f / 3.0f));
  const Vec near = fma(p * square, x, x);
  return select(lt(magnitude, set1(0.3f)), near, select(lt(x, zero()), zero() - far, far));
}

// How many of a row's values from `i` on a vector takes.
inline int lanes_at(int64_t i, int64_t size) { return size - i < kLanes ? static_cast<int>(size - i) : kLanes; }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
