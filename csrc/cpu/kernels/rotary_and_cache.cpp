// Rotary position embedding of queries and keys in place, half against half, and keys and values into their slots of
// the cache: keys across the cell's rows, values along one.
//
// A key across its cell touches a line for every other dimension, and in decode none of them is near: writing is bound
// by memory, and even a few tokens are worth several threads. The tokens of a prompt, whose slots follow each other,
// are written together, so that a line is touched once.
#include <cstring>
#include <initializer_list>

#include "../float8.h"
#include "../kernels.h"
#include "../scratch.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T>
inline void rotate(T* head, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec first = load(head + i), second = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, first * c - second * s);
    store(head + half + i, second * c + first * s);
  }
  if (i < half) {
    const int n = static_cast<int>(half - i);
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

inline int64_t slot_of(const CacheArgs& a, int64_t token) {
  return a.slots_int64 ? a.slots_int64[token] : a.slots_int32[token];
}

// How many tokens from `token` on, before `end`, have slots that follow each other within a block.
inline int64_t run_length(const CacheArgs& a, int64_t token, int64_t end) {
  const int64_t slot = slot_of(a, token);
  if (slot < 0) return 1;
  const int64_t most = least(end - token, a.block_size - slot % a.block_size);
  int64_t length = 1;
  while (length < most && slot_of(a, token + length) == slot + length) ++length;
  return length;
}

constexpr int64_t kTile = 8;

// out[c * out_stride + r] = x[r * x_stride + c] of a tile. Interleaving the rows of the first half with those of the
// second takes a bit of a value's row to its column and one of its column to its row: three times, and all are there.
inline void transpose_tile(const void* x, int64_t x_stride, void* out, int64_t out_stride) {
  typedef uint16_t Row __attribute__((vector_size(2 * kTile)));
  const Row low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
  Row rows[kTile], mixed[kTile];
  for (int64_t r = 0; r < kTile; ++r) std::memcpy(&rows[r], static_cast<const uint16_t*>(x) + r * x_stride, sizeof(Row));
  const auto mix = [&](const Row(&from)[kTile], Row(&to)[kTile]) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < kTile / 2; ++r) {
      to[2 * r] = __builtin_shuffle(from[r], from[r + kTile / 2], low);
      to[2 * r + 1] = __builtin_shuffle(from[r], from[r + kTile / 2], high);
    }
  };
  mix(rows, mixed);
  mix(mixed, rows);
  mix(rows, mixed);
  for (int64_t c = 0; c < kTile; ++c) std::memcpy(static_cast<uint16_t*>(out) + c * out_stride, &mixed[c], sizeof(Row));
}

// out[d * out_stride + r] = x[r * x_stride + d] of `rows` rows of `columns` values.
template <typename T>
inline void transpose(const T* x, int64_t x_stride, int64_t rows, int64_t columns, T* out, int64_t out_stride) {
  int64_t r = 0;
  if constexpr (sizeof(T) == sizeof(uint16_t)) {
    for (; columns % kTile == 0 && r + kTile <= rows; r += kTile) {
      for (int64_t d = 0; d < columns; d += kTile) {
        transpose_tile(x + r * x_stride + d, x_stride, out + d * out_stride + r, out_stride);
      }
    }
  }
  for (; r < rows; ++r) {
    for (int64_t d = 0; d < columns; ++d) out[d * out_stride + r] = x[r * x_stride + d];
  }
}

// Writes a run of tokens.
template <typename T>
void write_run(const CacheArgs& a, int64_t token, int64_t length) {
  const int64_t slot = slot_of(a, token);
  if (slot < 0) return;
  const int64_t size = a.block_size, block = slot / size, offset = slot % size;
  for (int64_t h = 0; h < a.k.num_heads; ++h) {
    const int64_t cell = (block * a.k.num_heads + h) * a.head_dim * size;
    const T* key = static_cast<const T*>(a.k.data) + token * a.k.token_stride + h * a.k.head_stride;
    const T* value = static_cast<const T*>(a.v.data) + token * a.v.token_stride + h * a.v.head_stride;
    transpose(key, a.k.token_stride, length, a.head_dim, static_cast<T*>(a.k_cache) + cell + offset, size);
    T* values = static_cast<T*>(a.v_cache) + cell + offset * a.head_dim;
    for (int64_t i = 0; i < length; ++i, value += a.v.token_stride, values += a.head_dim) {
      std::memcpy(values, value, a.head_dim * sizeof(T));
    }
  }
}

// The same in codes of 8 bits.
template <typename F, typename T>
void write_codes(const CacheArgs& a, int64_t token, int64_t length) {
  const int64_t slot = slot_of(a, token);
  if (slot < 0) return;
  const int64_t size = a.block_size, block = slot / size, offset = slot % size, dim = a.head_dim;
  for (int64_t h = 0; h < a.k.num_heads; ++h) {
    const int64_t cell = (block * a.k.num_heads + h) * dim * size;
    const T* key = static_cast<const T*>(a.k.data) + token * a.k.token_stride + h * a.k.head_stride;
    const T* value = static_cast<const T*>(a.v.data) + token * a.v.token_stride + h * a.v.head_stride;
    F* keys = static_cast<F*>(a.k_cache) + cell + offset;
    F* values = static_cast<F*>(a.v_cache) + cell + offset * dim;
    for (int64_t i = 0; i < length; ++i, key += a.k.token_stride, value += a.v.token_stride) {
      store_codes(key, a.k_scale, dim, keys + i, size);
      store_codes(value, a.v_scale, dim, values + i * dim, 1);
    }
  }
}

template <typename T>
void write_tokens(const CacheArgs& a, int64_t token, int64_t length) {
  switch (a.cache_dtype) {
    case CacheDType::same:
      return write_run<T>(a, token, length);
    case CacheDType::e4m3:
      return write_codes<E4M3, T>(a, token, length);
    case CacheDType::e5m2:
      return write_codes<E5M2, T>(a, token, length);
  }
}

template <typename T>
void rotate_all(const RotaryArgs& a) {
#pragma omp parallel for schedule(static) if (a.tokens * a.q.num_heads * a.rot_dim > 32768)
  for (int64_t token = 0; token < a.tokens; ++token) rotate_token<T>(a, token);
}

template <typename T>
void write_all(const CacheArgs& a, const RotaryArgs* rotary) {
#pragma omp parallel if (a.tokens * a.k.num_heads * a.head_dim > 2048)
  {
    const int64_t end = a.tokens * (this_thread() + 1) / num_threads();
    int64_t token = a.tokens * this_thread() / num_threads();
    for (int64_t length; token < end; token += length) {
      length = run_length(a, token, end);
      for (int64_t i = 0; rotary && i < length; ++i) rotate_token<T>(*rotary, token + i);
      write_tokens<T>(a, token, length);
    }
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
