// x * factor and x + y. One pass.
#include "../kernels.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T, typename F>
void each(const ElementwiseArgs& a, const F& value) {
  T* out = static_cast<T*>(a.out);
#pragma omp parallel for schedule(static) if (a.count > 32768)
  for (int64_t i = 0; i < a.count; i += kLanes) {
    const int n = a.count - i < kLanes ? static_cast<int>(a.count - i) : kLanes;
    store_n(out + i, value(i, n), n);
  }
}

template <typename T>
void scaled_values(const ElementwiseArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  each<T>(a, [&](int64_t i, int n) VLLM_INLINE { return load_n(x + i, n) * set1(a.factor); });
}

template <typename T>
void added_values(const ElementwiseArgs& a) {
  const T *x = static_cast<const T*>(a.x), *y = static_cast<const T*>(a.y);
  each<T>(a, [&](int64_t i, int n) VLLM_INLINE { return load_n(x + i, n) + load_n(y + i, n); });
}

}  // namespace

void scaled(const ElementwiseArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, scaled_values<scalar_t>(a)); }

void added(const ElementwiseArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, added_values<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
