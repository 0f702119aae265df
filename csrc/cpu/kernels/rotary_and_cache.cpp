// Rotary position embedding of queries and keys in place, half against half, and keys and values into their slots of
// the cache: keys across the cell's rows, values along one.
//
// A key across its cell touches a line for every other dimension, and in decode none of them is near: writing is bound
// by memory, and even a few tokens are worth several threads.
#include <cstring>
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
void rotate_token(const RotaryArgs& a, int64_t token) {
  const int64_t half = a.rot_dim / 2;
  const int64_t position = a.positions_int64 ? a.positions_int64[token] : a.positions_int32[token];
  const float* cos = a.cos_sin + position * a.rot_dim;
  for (const Heads* heads : {&a.q, &a.k}) {
    T* data = static_cast<T*>(heads->data) + token * heads->token_stride;
    for (int64_t h = 0; h < heads->num_heads; ++h) rotate(data + h * heads->head_stride, cos, cos + half, half);
  }
}

template <typename T>
void write_token(const CacheArgs& a, int64_t token) {
  const int64_t slot = a.slots_int64 ? a.slots_int64[token] : a.slots_int32[token];
  if (slot < 0) return;
  const int64_t size = a.block_size, block = slot / size, offset = slot % size;
  for (int64_t h = 0; h < a.k.num_heads; ++h) {
    const int64_t cell = (block * a.k.num_heads + h) * a.head_dim * size;
    const T* key = static_cast<const T*>(a.k.data) + token * a.k.token_stride + h * a.k.head_stride;
    const T* value = static_cast<const T*>(a.v.data) + token * a.v.token_stride + h * a.v.head_stride;
    T* keys = static_cast<T*>(a.k_cache) + cell + offset;
    for (int64_t d = 0; d < a.head_dim; ++d) keys[d * size] = key[d];
    std::memcpy(static_cast<T*>(a.v_cache) + cell + offset * a.head_dim, value, a.head_dim * sizeof(T));
  }
}

template <typename T>
void rotate_all(const RotaryArgs& a) {
#pragma omp parallel for schedule(static) if (a.tokens * a.q.num_heads * a.rot_dim > 32768)
  for (int64_t token = 0; token < a.tokens; ++token) rotate_token<T>(a, token);
}

template <typename T>
void write_all(const CacheArgs& a, const RotaryArgs* rotary) {
#pragma omp parallel for schedule(static) if (a.tokens * a.k.num_heads * a.head_dim > 2048)
  for (int64_t token = 0; token < a.tokens; ++token) {
    if (rotary) rotate_token<T>(*rotary, token);
    write_token<T>(a, token);
  }
}

}  // namespace

void rotary(const RotaryArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, rotate_all<scalar_t>(a)); }

void write_cache(const CacheArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, write_all<scalar_t>(a, nullptr)); }

void rotary_and_cache(const RotaryArgs& rotary, const CacheArgs& cache) {
  VLLM_DISPATCH_DTYPE(cache.dtype, write_all<scalar_t>(cache, &rotary));
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
