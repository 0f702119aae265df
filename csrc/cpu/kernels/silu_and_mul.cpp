// silu(gate) * up of rows that hold the gate's half, then the up half. One pass.
#include "../kernels.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T>
void row(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int n = width - i < kLanes ? static_cast<int>(width - i) : kLanes;
    store_n(out + i, silu(load_n(gate + i, n)) * load_n(up + i, n), n);
  }
}

template <typename T>
void all_rows(const SiluAndMulArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  T* out = static_cast<T*>(a.out);
#pragma omp parallel for schedule(static) if (a.rows * a.width > 16384)
  for (int64_t r = 0; r < a.rows; ++r) {
    row(x + r * a.x_stride, x + r * a.x_stride + a.width, out + r * a.width, a.width);
  }
}

}  // namespace

void silu_and_mul(const SiluAndMulArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, all_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
