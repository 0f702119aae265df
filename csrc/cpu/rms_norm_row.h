// The root-mean-square norm of one row, in two passes of which the first brings it into cache: the sum of squares, then
// the scaling.
//
// Include only from kernels/*.cpp.
#pragma once

#include <cstdint>

#include "scratch.h"
#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// residual += x, rounded to the dtype; returns what was stored, so that the norm is of the stored residual.
template <typename T>
inline Vec add_to_residual(T* residual, const T* x) {
  store(residual, load(x) + load(residual));
  return load(residual);
}
template <typename T>
inline Vec add_to_residual(T* residual, const T* x, int n) {
  store_n(residual, load_n(x, n) + load_n(residual, n), n);
  return load_n(residual, n);
}

// out = norm(x), or norm(residual += x) where there is a residual, times weight.
template <typename T, typename W>
inline void norm_row(const T* x, T* residual, const W* weight, T* out, int64_t hidden, float eps) {
  constexpr int kSums = 4;
  Vec sums[kSums] = {zero(), zero(), zero(), zero()};
  const T* source = residual == nullptr ? x : residual;
  int64_t i = 0;
  for (; i + kSums * kLanes <= hidden; i += kSums * kLanes) {
    unroll<kSums>([&](auto lane) VLLM_INLINE {
      const int64_t at = i + lane * kLanes;
      const Vec value = residual == nullptr ? load(x + at) : add_to_residual(residual + at, x + at);
      sums[lane] = fma(value, value, sums[lane]);
    });
  }
  unroll<kSums>([&](auto lane) VLLM_INLINE {
    if (const int n = static_cast<int>(least(hidden - i, kLanes)); n > 0) {
      const Vec value = residual == nullptr ? load_n(x + i, n) : add_to_residual(residual + i, x + i, n);
      sums[lane] = fma(value, value, sums[lane]);
      i += n;
    }
  });
  const float square_sum = reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const Vec scale = set1(1.0f / __builtin_sqrtf(square_sum / static_cast<float>(hidden) + eps));
  for (i = 0; i + kLanes <= hidden; i += kLanes) {
    store(out + i, load(source + i) * scale * load(weight + i));
  }
  if (i < hidden) {
    const int n = static_cast<int>(hidden - i);
    store_n(out + i, load_n(source + i, n) * scale * load_n(weight + i, n), n);
  }
}

// The same with a weight of float32 if it is `wide`, else of T.
template <typename T>
inline void norm_row(const T* x, T* residual, const void* weight, bool wide, T* out, int64_t hidden, float eps) {
  if (wide) return norm_row(x, residual, static_cast<const float*>(weight), out, hidden, eps);
  norm_row(x, residual, static_cast<const T*>(weight), out, hidden, eps);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
