// Layer norm of rows, alone or of residual += x: three passes of which the first brings a row into the first-level
// cache. Variances are means of squared differences: squares of values less the square of their mean would cancel.
#include "../kernels_encoder.h"
#include "../rms_norm_row.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

inline Vec add_all(const Vec (&sums)[4]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

// The sum of f(value) of a row's values, with lanes beyond the row as zeros; f(at, lanes) is given their place.
template <typename F>
inline float sum_over(int64_t hidden, const F& f) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= hidden; i += 4 * kLanes) {
    unroll<4>([&](auto lane) VLLM_INLINE { sums[lane] = sums[lane] + f(i + lane * kLanes, kLanes); });
  }
  for (int lane = 0; i < hidden; i += kLanes, ++lane) {
    const int n = hidden - i < kLanes ? static_cast<int>(hidden - i) : kLanes;
    sums[lane] = sums[lane] + select(lanes_below(n), f(i, n), zero());
  }
  return reduce_sum(add_all(sums));
}

template <typename T, typename W>
void norm_row(const LayerNormArgs& a, const T* x, T* residual, int64_t head, T* out) {
  const T* source = residual == nullptr ? x : residual;
  const float size = static_cast<float>(a.hidden);
  const float sum = sum_over(a.hidden, [&](int64_t i, int n) VLLM_INLINE {
    return residual == nullptr ? load_n(x + i, n) : add_to_residual(residual + i, x + i, n);
  });
  const Vec mean = set1(sum / size);
  const float squares = sum_over(a.hidden, [&](int64_t i, int n) VLLM_INLINE {
    const Vec difference = load_n(source + i, n) - mean;
    return difference * difference;
  });
  const Vec scale = set1(1.0f / __builtin_sqrtf(squares / size + a.eps));
  const W* weight = static_cast<const W*>(a.weight) + head * a.weight_stride;
  const W* bias = static_cast<const W*>(a.bias) + head * a.weight_stride;
  for (int64_t i = 0; i < a.hidden; i += kLanes) {
    const int n = a.hidden - i < kLanes ? static_cast<int>(a.hidden - i) : kLanes;
    Vec value = (load_n(source + i, n) - mean) * scale;
    if (a.weight != nullptr) value = value * load_n(weight + i, n);
    if (a.bias != nullptr) value = value + load_n(bias + i, n);
    store_n(out + i, value, n);
  }
}

template <typename T, typename W>
void norm_rows(const LayerNormArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  T* residual = static_cast<T*>(a.residual);
#pragma omp parallel for schedule(static) if (a.rows * a.heads * a.hidden > 32768)
  for (int64_t each = 0; each < a.rows * a.heads; ++each) {
    const int64_t row = each / a.heads, head = each % a.heads;
    T* sum = residual == nullptr ? nullptr : residual + row * a.residual_stride;
    norm_row<T, W>(a, x + row * a.x_stride + head * a.head_stride, sum, head, static_cast<T*>(a.out) + each * a.hidden);
  }
}

}  // namespace

void layer_norm(const LayerNormArgs& a) {
  VLLM_DISPATCH_DTYPE(a.dtype, a.wide_weight ? norm_rows<scalar_t, float>(a) : norm_rows<scalar_t, scalar_t>(a));
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
