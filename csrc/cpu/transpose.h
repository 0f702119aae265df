// Square blocks of 32-bit values, transposed in registers.
//
// Include only from kernels/*.cpp.
#pragma once

#include <utility>

#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Exchange lanes of two rows `Width` apart: the first gets those of both whose index has not the bit `Width`, the second those
// that have it.
template <int Width, int... I>
[[gnu::always_inline]] inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
  const auto first = __builtin_shufflevector(a.v, b.v, (I & Width ? kLanes + I - Width : I)...);
  const auto second = __builtin_shufflevector(a.v, b.v, (I & Width ? kLanes + I : I + Width)...);
  a.v = first;
  b.v = second;
}

// rows[i] lane j <-> rows[j] lane i: bit by bit of the indices.
template <int Width = 1>
[[gnu::always_inline]] inline void transpose(Vec (&rows)[kLanes]) {
  if constexpr (Width < kLanes) {
    unroll<kLanes>([&](auto i) VLLM_INLINE {
      if constexpr ((i & Width) == 0) {
        exchange<Width>(rows[i], rows[i + Width], std::make_integer_sequence<int, kLanes>{});
      }
    });
    transpose<2 * Width>(rows);
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
