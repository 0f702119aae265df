// Mamba 2's state space: a matrix a head, of which all decays by one number a token.
#include "../kernels_state.h"
#include "../matrix_state.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

struct Memory {
  Memory(const StateSpaceArgs& a) : tile(a.state_dim, false), block(a.state_dim * kBlockVectors * kLanes) {}
  StateTile tile;
  Scratch<float> block;
};

template <typename T>
void prepare(const StateSpaceArgs& a, int64_t head, int64_t first, int64_t tokens, StateTile& tile) {
  const int64_t group = head / (a.heads / a.groups), size = a.state_dim;
  const T* dts = static_cast<const T*>(a.dt);
  for (int64_t t = 0; t < tokens; ++t) {
    const T* row = static_cast<const T*>(a.xbc) + (first + t) * a.xbc_stride + a.heads * a.head_dim + group * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const int n = lanes_at(i, size);
      store_n(tile.k.get() + t * size + i, load_n(row + i, n), n);
      store_n(tile.q.get() + t * size + i, load_n(row + a.groups * size + i, n), n);
    }
    const Vec x = load_n(dts + (first + t) * a.dt_stride + head, 1) + set1(a.bias[head]);
    const Vec dt = min(set1(a.dt_max), max(set1(a.dt_min), softplus(x)));
    store_n(tile.scale.get() + t, dt, 1);
    store_n(tile.decay.get() + t, exp(zero() - dt * set1(a.rate[head])), 1);
  }
}

template <typename T>
void all_rows(const StateSpaceArgs& a) {
  const int64_t values = a.head_dim;
  const auto head_of = [&](Memory& own, int64_t head, int64_t first, int64_t last, float* state) {
    const Vec skip = set1(a.skip == nullptr ? 0.0f : a.skip[head]);
    for (int64_t from = first; from < last; from += kStateTile) {
      const int64_t tokens = least(kStateTile, last - from);
      prepare<T>(a, head, from, tokens, own.tile);
      const T* x = static_cast<const T*>(a.xbc) + from * a.xbc_stride + head * values;
      T* out = static_cast<T*>(a.out) + (from * a.heads + head) * values;
      through_state<false, false>(
          state, a.state_dim, values, own.tile, tokens, own.block.get(),
          [&](int64_t t, int64_t at, Vec) VLLM_INLINE {
            return load_n(x + t * a.xbc_stride + at, lanes_at(at, values)) * set1(own.tile.scale[t]);
          },
          [&](int64_t t, int64_t at, Vec result) VLLM_INLINE {
            const int n = lanes_at(at, values);
            store_n(out + t * a.heads * values + at, fma(skip, load_n(x + t * a.xbc_stride + at, n), result), n);
          });
    }
  };
  for_each_head(a.rows, a.heads, a.pool, a.slot_stride, a.state_dim * values, [&] { return Memory(a); }, head_of);
}

}  // namespace

void state_space_scan(const StateSpaceArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, all_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
