// RMSNorm of groups of a row with a gate, before or after it.
#include "../gates.h"
#include "../kernels_state.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T, typename W>
void norm_group(const GatedNormArgs& a, int64_t token, int64_t group) {
  const T* x = static_cast<const T*>(a.x) + token * a.x_stride + group * a.width;
  const T* gate = static_cast<const T*>(a.gate) + token * a.gate_stride + group * a.width;
  const W* weight = static_cast<const W*>(a.weight) + group * a.weight_stride;
  T* out = static_cast<T*>(a.out) + (token * a.groups + group) * a.width;
  const auto gate_at = [&](int64_t i, int n) VLLM_INLINE {
    const Vec value = load_n(gate + i, n);
    return a.sigmoid ? sigmoid(value) : silu(value);
  };
  const auto value_at = [&](int64_t i, int n) VLLM_INLINE {
    const Vec value = load_n(x + i, n);
    return a.gate_first ? value * gate_at(i, n) : value;
  };
  Vec squares = zero();
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const Vec value = value_at(i, lanes_at(i, a.width));
    squares = fma(value, value, squares);
  }
  const Vec scale = set1(1.0f / __builtin_sqrtf(reduce_sum(squares) / static_cast<float>(a.width) + a.eps));
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const int n = lanes_at(i, a.width);
    Vec value = value_at(i, n) * scale * load_n(weight + i, n);
    if (!a.gate_first) value = value * gate_at(i, n);
    store_n(out + i, value, n);
  }
}

template <typename T, typename W>
void norm_all(const GatedNormArgs& a) {
#pragma omp parallel for schedule(static) if (a.tokens * a.groups * a.width > 16384)
  for (int64_t each = 0; each < a.tokens * a.groups; ++each) norm_group<T, W>(a, each / a.groups, each % a.groups);
}

}  // namespace

void gated_rms_norm(const GatedNormArgs& a) {
  VLLM_DISPATCH_DTYPE(a.dtype, a.wide_weight ? norm_all<scalar_t, float>(a) : norm_all<scalar_t, scalar_t>(a));
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
