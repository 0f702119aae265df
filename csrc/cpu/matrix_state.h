// The state of a head that is a matrix [keys, values], taken from token to token: S = decay S + k u, and o = q S after that.
//
// A column of the matrix needs no other one, so that a block of columns goes through many tokens while it stays in the
// first-level cache. Every sum over keys is two of them, of even and of odd rows, in the order of the rows: results
// depend neither on how many columns are taken at once nor on where a sequence is cut.
#pragma once

#include "gates.h"
#include "scratch.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Tokens whose keys and queries are prepared together.
constexpr int64_t kStateTile = 64;

// Tokens of one head, all float32.
struct StateTile {
  StateTile(int64_t keys, bool by_channel)
      : q(kStateTile * keys), k(kStateTile * keys), decayed(kStateTile * keys),
        decay(kStateTile * (by_channel ? keys : 1)), scale(kStateTile) {}

  Scratch<float> q, k;     // [tokens, keys]
  Scratch<float> decayed;  // k * decay
  Scratch<float> decay;    // [tokens], or of each key
  Scratch<float> scale;    // [tokens], of what is written
};

// q S, or k S, over rows of a block of N vectors.
template <int N>
[[gnu::always_inline]] inline void recall(const float* state, int64_t stride, int64_t keys, const float* k, Vec* sum) {
  Vec even[N], odd[N];
  unroll<N>([&](auto j) VLLM_INLINE { even[j] = odd[j] = zero(); });
  for (int64_t i = 0; i + 1 < keys; i += 2) {
    const Vec first = set1(k[i]), second = set1(k[i + 1]);
    const float* row = state + i * stride;
    unroll<N>([&](auto j) VLLM_INLINE {
      even[j] = fma(first, load(row + j * kLanes), even[j]);
      odd[j] = fma(second, load(row + stride + j * kLanes), odd[j]);
    });
  }
  if (keys % 2 != 0) {
    const Vec last = set1(k[keys - 1]);
    const float* row = state + (keys - 1) * stride;
    unroll<N>([&](auto j) VLLM_INLINE { even[j] = fma(last, load(row + j * kLanes), even[j]); });
  }
  unroll<N>([&](auto j) VLLM_INLINE { sum[j] = even[j] + odd[j]; });
}

// One token: writes u to the state, and reads it for the token's query and, if there is a `next` key, for that.
template <int N, bool kChannels, bool kNext>
[[gnu::always_inline]] inline void advance(float* state, int64_t stride, int64_t keys, const float* decay,
                                           const float* k, const float* q, const float* next, const Vec* u, Vec* out,
                                           Vec* recalled) {
  Vec even[N], odd[N], next_even[N], next_odd[N];
  unroll<N>([&](auto j) VLLM_INLINE { even[j] = odd[j] = next_even[j] = next_odd[j] = zero(); });
  const auto row_of = [&](int64_t i, Vec* sum, Vec* next_sum) VLLM_INLINE {
    const Vec kept = set1(decay[kChannels ? i : 0]), key = set1(k[i]), query = set1(q[i]);
    float* row = state + i * stride;
    unroll<N>([&](auto j) VLLM_INLINE {
      const Vec value = fma(key, u[j], kept * load(row + j * kLanes));
      store(row + j * kLanes, value);
      sum[j] = fma(query, value, sum[j]);
      if constexpr (kNext) next_sum[j] = fma(set1(next[i]), value, next_sum[j]);
    });
  };
  for (int64_t i = 0; i + 1 < keys; i += 2) {
    row_of(i, even, next_even);
    row_of(i + 1, odd, next_odd);
  }
  if (keys % 2 != 0) row_of(keys - 1, even, next_even);
  unroll<N>([&](auto j) VLLM_INLINE { out[j] = even[j] + odd[j]; });
  if constexpr (kNext) unroll<N>([&](auto j) VLLM_INLINE { recalled[j] = next_even[j] + next_odd[j]; });
}

// `tokens` of a tile through a block of N vectors of columns. `write(t, j, recalled)` gives what token t writes to its
// vector j, given k S where the state is `kDelta`, of a delta rule; `read(t, j, out)` takes q S.
template <int N, bool kDelta, bool kChannels, typename Write, typename Read>
void through_block(float* state, int64_t stride, int64_t keys, const StateTile& tile, int64_t tokens, const Write& write,
                   const Read& read) {
  Vec u[N], out[N], recalled[N];
  unroll<N>([&](auto j) VLLM_INLINE { recalled[j] = zero(); });
  if constexpr (kDelta) recall<N>(state, stride, keys, tile.decayed.get(), recalled);
  for (int64_t t = 0; t < tokens; ++t) {
    unroll<N>([&](auto j) VLLM_INLINE { u[j] = write(t, static_cast<int>(j), recalled[j]); });
    const float *k = tile.k.get() + t * keys, *q = tile.q.get() + t * keys;
    const float* decay = tile.decay.get() + (kChannels ? t * keys : t);
    if (kDelta && t + 1 < tokens) {
      const float* next = tile.decayed.get() + (t + 1) * keys;
      advance<N, kChannels, kDelta>(state, stride, keys, decay, k, q, next, u, out, recalled);
    } else {
      advance<N, kChannels, false>(state, stride, keys, decay, k, q, nullptr, u, out, recalled);
    }
    unroll<N>([&](auto j) VLLM_INLINE { read(t, static_cast<int>(j), out[j]); });
  }
}

// Columns that a prompt's block has.
constexpr int kBlockVectors = 2;
constexpr int kWideVectors = kLanes == 16 ? 8 : 4;

// `tokens` of a tile through a head's state [keys, values] in place. `block` is memory for keys * kBlockVectors vectors.
// As in through_block, but with the column that a vector begins at in place of its number.
template <bool kDelta, bool kChannels, typename Write, typename Read>
void through_state(float* state, int64_t keys, int64_t values, const StateTile& tile, int64_t tokens, float* block,
                   const Write& write, const Read& read) {
  const auto in_place = [&](auto vectors) VLLM_INLINE {
    constexpr int n = vectors;
    for (int64_t at = 0; at < values; at += n * kLanes) {
      through_block<n, kDelta, kChannels>(
          state + at, values, keys, tile, tokens,
          [&](int64_t t, int j, Vec recalled) VLLM_INLINE { return write(t, at + j * kLanes, recalled); },
          [&](int64_t t, int j, Vec out) VLLM_INLINE { read(t, at + j * kLanes, out); });
    }
  };
  // One token reads its state once: rows are whole, as memory likes it.
  if (tokens == 1 && values % (kWideVectors * kLanes) == 0) return in_place(Constant<kWideVectors>{});
  if (tokens == 1 && values % (kBlockVectors * kLanes) == 0) return in_place(Constant<kBlockVectors>{});
  constexpr int64_t width = kBlockVectors * kLanes;
  for (int64_t at = 0; at < values; at += width) {
    for (int64_t i = 0; i < keys; ++i) {
      for (int64_t j = 0; j < width; j += kLanes) {
        const int64_t left = values - at - j;
        const int n = left <= 0 ? 0 : lanes_at(0, left);
        store(block + i * width + j, n == 0 ? zero() : load_n(state + i * values + at + j, n));
      }
    }
    through_block<kBlockVectors, kDelta, kChannels>(
        block, width, keys, tile, tokens,
        [&](int64_t t, int j, Vec recalled) VLLM_INLINE {
          return at + j * kLanes < values ? write(t, at + j * kLanes, recalled) : zero();
        },
        [&](int64_t t, int j, Vec out) VLLM_INLINE {
          if (at + j * kLanes < values) read(t, at + j * kLanes, out);
        });
    for (int64_t i = 0; i < keys; ++i) {
      for (int64_t j = 0; j < width && at + j < values; j += kLanes) {
        store_n(state + i * values + at + j, load(block + i * width + j), lanes_at(0, values - at - j));
      }
    }
  }
}

// Runs `head(row, head, first, last)` for the heads of all rows, whose states are zero where a sequence begins. `own` makes
// what a thread needs.
template <typename Rows, typename Own, typename Head>
void for_each_head(const Rows& rows, int64_t heads, float* pool, int64_t slot_stride, int64_t size, const Own& own,
                   const Head& head) {
  const int64_t tasks = rows.rows * heads;
  const int64_t work = (rows.starts[rows.rows] - rows.starts[0]) * heads * size;
#pragma omp parallel if (tasks > 1 && work > 32768)
  {
    auto memory = own();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t row = task / heads, h = task % heads;
      const int64_t first = rows.starts[row], last = rows.starts[row + 1];
      if (first == last) continue;
      float* state = pool + rows.slots[row] * slot_stride + h * size;
      if (rows.is_new(row)) std::memset(state, 0, size * sizeof(float));
      head(memory, h, first, last, state);
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
