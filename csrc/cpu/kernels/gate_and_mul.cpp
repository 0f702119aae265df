// activation(gate) * up of rows that hold the gate's half, then the up half. One pass.
#include "../gelu.h"
#include "../kernels.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T, typename F>
void all_rows(const GateAndMulArgs& a, const F& activation) {
#pragma omp parallel for schedule(static) if (a.rows * a.width > 16384)
  for (int64_t r = 0; r < a.rows; ++r) {
    const T* gate = static_cast<const T*>(a.x) + r * a.x_stride;
    const T* up = gate + a.width;
    T* out = static_cast<T*>(a.out) + r * a.width;
    for (int64_t i = 0; i < a.width; i += kLanes) {
      const int n = a.width - i < kLanes ? static_cast<int>(a.width - i) : kLanes;
      store_n(out + i, activation(load_n(gate + i, n)) * load_n(up + i, n), n);
    }
  }
}

template <typename T>
void activated(const GateAndMulArgs& a) {
  switch (a.activation) {
    case Activation::silu:
      return all_rows<T>(a, [](Vec x) VLLM_INLINE { return silu(x); });
    case Activation::gelu_tanh:
      return all_rows<T>(a, [](Vec x) VLLM_INLINE { return gelu_tanh(x); });
    case Activation::gelu:
      return all_rows<T>(a, [](Vec x) VLLM_INLINE { return gelu(x); });
  }
}

}  // namespace

void gate_and_mul(const GateAndMulArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, activated<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
