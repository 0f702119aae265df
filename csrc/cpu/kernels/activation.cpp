// An activation of each value, in place. One pass.
#include "../gates.h"
#include "../gelu.h"
#include "../kernels_encoder.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Values that a thread takes at a time.
constexpr int64_t kPart = 4096;

template <typename T, typename F>
void all_values(const ActivationArgs& a, const F& f) {
  T* x = static_cast<T*>(a.x);
#pragma omp parallel for schedule(static) if (a.count > 4 * kPart)
  for (int64_t begin = 0; begin < a.count; begin += kPart) {
    const int64_t end = begin + kPart < a.count ? begin + kPart : a.count;
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) store(x + i, f(load(x + i)));
    if (i < end) store_n(x + i, f(load_n(x + i, static_cast<int>(end - i))), static_cast<int>(end - i));
  }
}

template <typename T>
void activate(const ActivationArgs& a) {
  switch (a.curve) {
    case Curve::silu:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return silu(x); });
    case Curve::gelu_tanh:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return gelu_tanh(x); });
    case Curve::gelu:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return gelu(x); });
    case Curve::relu:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return max(zero(), x); });
    case Curve::relu2:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return max(zero(), x) * max(zero(), x); });
    case Curve::quick_gelu:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return silu(x * set1(1.702f)) * set1(1.0f / 1.702f); });
    case Curve::sigmoid:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return sigmoid(x); });
    case Curve::tanh:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return tanh(x); });
    case Curve::mish:
      return all_values<T>(a, [](Vec x) VLLM_INLINE { return x * tanh(softplus(x)); });
  }
}

}  // namespace

void activation(const ActivationArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, activate<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
