// xLSTM's matrix memory: a matrix a head, whose gates are exponentials, kept in range by the greatest one so far.
#include "../kernels_state.h"
#include "../matrix_state.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

struct Memory {
  Memory(const MlstmArgs& a)
      : tile(a.key_dim, false), block(a.key_dim * kBlockVectors * kLanes), divisor(kStateTile) {}
  StateTile tile;
  Scratch<float> block, divisor;
};

inline Vec absolute(Vec x) { return max(x, zero() - x); }

// cap * tanh(x / cap), by a series where it is small.
inline Vec capped(Vec x, Vec cap) {
  const Vec y = x / cap, squared = y * y, e = min(set1(1e30f), exp(zero() - (y + y)));
  const Vec inner = fma(squared, fma(squared, set1(-17.0f / 315.0f), set1(2.0f / 15.0f)), set1(-1.0f / 3.0f));
  const Vec series = fma(y * squared, inner, y);
  return cap * select(lt(absolute(y), set1(0.2f)), series, (set1(1.0f) - e) / (set1(1.0f) + e));
}

// `norm` is [keys], the sum of keys; `peak` is the logarithm of what both it and the matrix are divided by.
template <typename T>
void prepare(const MlstmArgs& a, int64_t head, int64_t first, int64_t tokens, float* norm, float* peak, Memory& own) {
  const int64_t keys = a.key_dim;
  const Vec query_scale = set1(1.0f / __builtin_sqrtf(static_cast<float>(keys))), cap = set1(a.cap);
  StateTile& tile = own.tile;
  for (int64_t t = 0; t < tokens; ++t) {
    const T* row = static_cast<const T*>(a.qkv) + (first + t) * a.qkv_stride + head * keys;
    const T* gates = static_cast<const T*>(a.gates) + (first + t) * a.gates_stride + head;
    const Vec input = capped(load_n(gates, 1), cap), kept = capped(load_n(gates + a.heads, 1), cap);
    const Vec before = load_n(peak, 1), loss = softplus(zero() - kept), now = max(before - loss, input);
    store_n(peak, now, 1);
    // The difference is exact where peaks are near, and so has what rounding this one lost.
    store_n(tile.decay.get() + t, exp((before - now) - loss), 1);
    store_n(tile.scale.get() + t, exp(input - now), 1);
    const Vec decay = set1(tile.decay[t]), scale = set1(tile.scale[t]);
    Vec sum = zero();
    for (int64_t i = 0; i < keys; i += kLanes) {
      const int n = lanes_at(i, keys);
      const Vec q = load_n(row + i, n) * query_scale, k = load_n(row + a.heads * keys + i, n);
      store_n(tile.q.get() + t * keys + i, q, n);
      store_n(tile.k.get() + t * keys + i, k, n);
      const Vec value = fma(scale, k, decay * load_n(norm + i, n));
      store_n(norm + i, value, n);
      sum = fma(q, value, sum);
    }
    const Vec least_divisor = exp(zero() - now);
    store_n(own.divisor.get() + t, max(absolute(set1(reduce_sum(sum))), least_divisor) + set1(a.eps), 1);
  }
}

template <typename T>
void all_rows(const MlstmArgs& a) {
  const int64_t keys = a.key_dim, values = a.value_dim, width = a.heads * values;
  const auto head_of = [&](Memory& own, int64_t head, int64_t first, int64_t last, float* state) {
    float *norm = state + keys * values, *peak = norm + keys;
    for (int64_t from = first; from < last; from += kStateTile) {
      const int64_t tokens = least(kStateTile, last - from);
      prepare<T>(a, head, from, tokens, norm, peak, own);
      const T* v = static_cast<const T*>(a.qkv) + from * a.qkv_stride + 2 * a.heads * keys + head * values;
      T* out = static_cast<T*>(a.out) + from * width + head * values;
      through_state<false, false>(
          state, keys, values, own.tile, tokens, own.block.get(),
          [&](int64_t t, int64_t at, Vec) VLLM_INLINE {
            return load_n(v + t * a.qkv_stride + at, lanes_at(at, values)) * set1(own.tile.scale[t]);
          },
          [&](int64_t t, int64_t at, Vec result) VLLM_INLINE {
            store_n(out + t * width + at, result / set1(own.divisor[t]), lanes_at(at, values));
          });
    }
  };
  const int64_t size = keys * values + keys + 1;
  for_each_head(a.rows, a.heads, a.pool, a.slot_stride, size, [&] { return Memory(a); }, head_of);
}

}  // namespace

void mlstm(const MlstmArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, all_rows<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
