// The gated delta rule: what a key's memory lacks of a value is added to it, after all of it has decayed.
#include "../kernels_state.h"
#include "../matrix_state.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

struct Memory {
  Memory(const DeltaRuleArgs& a) : tile(a.key_dim, a.by_channel), block(a.key_dim * kBlockVectors * kLanes) {}
  StateTile tile;
  Scratch<float> block;
};

// x / sqrt(sum of squares + eps) * scale
template <typename T>
void normalised(const T* x, int64_t size, float eps, float scale, float* out) {
  Vec squares = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec value = load_n(x + i, lanes_at(i, size));
    squares = fma(value, value, squares);
  }
  const Vec factor = set1(scale / __builtin_sqrtf(reduce_sum(squares) + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int n = lanes_at(i, size);
    store_n(out + i, load_n(x + i, n) * factor, n);
  }
}

// e^-(rate * softplus(x)), or, with a bound, e^(bound * sigmoid(rate * x)).
inline Vec decay_of(Vec x, float rate, float bound) {
  if (bound < 0) return exp(set1(bound) * sigmoid(set1(rate) * x));
  return exp(zero() - set1(rate) * softplus(x));
}

template <typename T>
void prepare(const DeltaRuleArgs& a, int64_t head, int64_t first, int64_t tokens, StateTile& tile) {
  const int64_t keys = a.key_dim, key_head = head / (a.heads / a.key_heads);
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(keys));
  const T* decays = static_cast<const T*>(a.decay);
  const T* betas = static_cast<const T*>(a.beta);
  for (int64_t t = 0; t < tokens; ++t) {
    const T* row = static_cast<const T*>(a.qkv) + (first + t) * a.qkv_stride + key_head * keys;
    normalised(row, keys, a.eps, query_scale, tile.q.get() + t * keys);
    normalised(row + a.key_heads * keys, keys, a.eps, 1.0f, tile.k.get() + t * keys);
    const T* decay = decays + (first + t) * a.decay_stride;
    if (a.by_channel) {
      for (int64_t i = 0; i < keys; i += kLanes) {
        const int n = lanes_at(i, keys);
        const int64_t at = head * keys + i;
        const Vec kept = decay_of(load_n(decay + at, n) + load_n(a.bias + at, n), a.rate[head], a.bound);
        store_n(tile.decay.get() + t * keys + i, kept, n);
        store_n(tile.decayed.get() + t * keys + i, kept * load_n(tile.k.get() + t * keys + i, n), n);
      }
    } else {
      const Vec kept = decay_of(load_n(decay + head, 1) + load_n(a.bias + head, 1), a.rate[head], a.bound);
      store_n(tile.decay.get() + t, kept, 1);
      const Vec all = set1(tile.decay[t]);
      for (int64_t i = 0; i < keys; i += kLanes) {
        const int n = lanes_at(i, keys);
        store_n(tile.decayed.get() + t * keys + i, all * load_n(tile.k.get() + t * keys + i, n), n);
      }
    }
    store_n(tile.scale.get() + t, set1(a.beta_scale) * sigmoid(load_n(betas + (first + t) * a.beta_stride + head, 1)), 1);
  }
}

template <typename T, bool kByChannel>
void all_rows(const DeltaRuleArgs& a) {
  const int64_t values = a.value_dim;
  const auto head_of = [&](Memory& own, int64_t head, int64_t first, int64_t last, float* state) {
    for (int64_t from = first; from < last; from += kStateTile) {
      const int64_t tokens = least(kStateTile, last - from);
      prepare<T>(a, head, from, tokens, own.tile);
      const T* value = static_cast<const T*>(a.qkv) + from * a.qkv_stride + 2 * a.key_heads * a.key_dim + head * values;
      T* out = static_cast<T*>(a.out) + (from * a.heads + head) * values;
      through_state<true, kByChannel>(
          state, a.key_dim, values, own.tile, tokens, own.block.get(),
          [&](int64_t t, int64_t at, Vec recalled) VLLM_INLINE {
            return (load_n(value + t * a.qkv_stride + at, lanes_at(at, values)) - recalled) * set1(own.tile.scale[t]);
          },
          [&](int64_t t, int64_t at, Vec result) VLLM_INLINE {
            store_n(out + t * a.heads * values + at, result, lanes_at(at, values));
          });
    }
  };
  for_each_head(a.rows, a.heads, a.pool, a.slot_stride, a.key_dim * values, [&] { return Memory(a); }, head_of);
}

}  // namespace

void gated_delta_rule(const DeltaRuleArgs& a) {
  VLLM_DISPATCH_DTYPE(a.dtype, a.by_channel ? all_rows<scalar_t, true>(a) : all_rows<scalar_t, false>(a));
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
