#include "../kernels.h"
#include "../rms_norm_row.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T>
void norm_rows(const RmsNormArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  T* residual = static_cast<T*>(a.residual);
#pragma omp parallel for schedule(static) if (a.rows * a.heads * a.hidden > 32768)
  for (int64_t head = 0; head < a.rows * a.heads; ++head) {
    const int64_t row = head / a.heads;
    T* sum = residual == nullptr ? nullptr : residual + row * a.residual_stride;
    norm_row(x + row * a.x_stride + head % a.heads * a.head_stride, sum, a.weight, a.wide_weight,
             static_cast<T*>(a.out) + head * a.hidden, a.hidden, a.eps);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, norm_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
