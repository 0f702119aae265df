// Writes each token's keys and values into its slot: keys across the cell's rows, values along one.
#include <cstring>

#include "../kernels.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T>
void write_all(const CacheArgs& a) {
  const int64_t cell = a.head_dim * a.block_size;
#pragma omp parallel for schedule(static) if (a.tokens * a.k.num_heads * a.head_dim > 16384)
  for (int64_t token = 0; token < a.tokens; ++token) {
    const int64_t slot = a.slots_int64 ? a.slots_int64[token] : a.slots_int32[token];
    if (slot < 0) continue;
    const int64_t block = slot / a.block_size, offset = slot % a.block_size;
    for (int64_t h = 0; h < a.k.num_heads; ++h) {
      const int64_t start = (block * a.k.num_heads + h) * cell;
      const T* key = static_cast<const T*>(a.k.data) + token * a.k.token_stride + h * a.k.head_stride;
      const T* value = static_cast<const T*>(a.v.data) + token * a.v.token_stride + h * a.v.head_stride;
      T* keys = static_cast<T*>(a.k_cache) + start + offset;
      for (int64_t d = 0; d < a.head_dim; ++d) keys[d * a.block_size] = key[d];
      std::memcpy(static_cast<T*>(a.v_cache) + start + offset * a.head_dim, value, a.head_dim * sizeof(T));
    }
  }
}

}  // namespace

void write_cache(const CacheArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, write_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
