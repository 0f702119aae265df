// Two passes over a row that the first has brought into cache: the sum of squares, then the scaling.
#include "../kernels.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// residual += x, rounded to the dtype; returns what was stored, so that the norm is of the stored residual.
template <typename T>
inline Vec add_to(T* residual, const T* x, int n) {
  store_n(residual, load_n(x, n) + load_n(residual, n), n);
  return load_n(residual, n);
}

template <typename T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t hidden, float eps) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  const T* source = residual == nullptr ? x : residual;
  int64_t i = 0;
  for (int lane = 0; i < hidden; i += kLanes, lane = (lane + 1) & 3) {
    const int n = hidden - i < kLanes ? static_cast<int>(hidden - i) : kLanes;
    const Vec value = residual == nullptr ? load_n(x + i, n) : add_to(residual + i, x + i, n);
    sums[lane] = fma(value, value, sums[lane]);
  }
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

template <typename T>
void norm_rows(const RmsNormArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  T* residual = static_cast<T*>(a.residual);
#pragma omp parallel for schedule(static) if (a.rows * a.heads * a.hidden > 32768)
  for (int64_t head = 0; head < a.rows * a.heads; ++head) {
    const int64_t row = head / a.heads;
    T* sum = residual == nullptr ? nullptr : residual + row * a.residual_stride;
    norm_row(x + row * a.x_stride + head % a.heads * a.head_stride, sum, static_cast<const T*>(a.weight),
             static_cast<T*>(a.out) + head * a.hidden, a.hidden, a.eps);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, norm_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
