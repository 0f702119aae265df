// Rotates each head's first rot_dim values, half against half, in place.
#include <initializer_list>

#include "../kernels.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T>
inline void rotate(T* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int n = half - i < kLanes ? static_cast<int>(half - i) : kLanes;
    const Vec first = load_n(head + i, n), second = load_n(head + half + i, n);
    const Vec c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(head + i, first * c - second * s, n);
    store_n(head + half + i, second * c + first * s, n);
  }
}

template <typename T>
void rotate_all(const RotaryArgs& a) {
  const int64_t half = a.rot_dim / 2;
#pragma omp parallel for schedule(static) if (a.tokens * a.q.num_heads * a.rot_dim > 32768)
  for (int64_t token = 0; token < a.tokens; ++token) {
    const int64_t position = a.positions_int64 ? a.positions_int64[token] : a.positions_int32[token];
    const float* cos = a.cos_sin + position * a.rot_dim;
    for (const Heads* heads : {&a.q, &a.k}) {
      T* data = static_cast<T*>(heads->data) + token * heads->token_stride;
      for (int64_t h = 0; h < heads->num_heads; ++h) rotate(data + h * heads->head_stride, cos, cos + half, half);
    }
  }
}

}  // namespace

void rotary(const RotaryArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, rotate_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
