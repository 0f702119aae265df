// Causal attention of ragged queries over the paged cache, float32 inside.
//
// A task is one key head of one request and a tile of rows, a row being one query head of one token that reads this
// key head. The context passes in chunks of 64 tokens counted from the sequence's start; scores, their softmax and the
// weighted values of a chunk stay in the first-level cache. Every row sees the same chunks in the same order however
// the queries were tiled, chunked or batched, so its result does not depend on them.
//
// Keys are read where they lie when 16 tokens of a block are neighbours; with other block sizes they are copied a chunk
// at a time.
#include "../kernels.h"
#include "../scratch.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int kChunk = 64;
constexpr int kRun = 16;  // neighbouring tokens of a key vector
constexpr int kRuns = kChunk / kRun;
constexpr int kTileRows = 48;
constexpr int kMostRows = 256;  // when one token has more query heads a key head than a tile has rows
// Accumulators: kRows rows times kWide vectors.
constexpr int kRows = kLanes == 16 ? 6 : 4;
constexpr int kWide = kLanes == 16 ? 4 : 2;

template <typename T>
struct Chunk {
  const T* keys[kRuns];  // [head_dim] rows of 16 neighbouring tokens
  int64_t key_stride;
  const T* values[kChunk];  // [head_dim]
};

struct Tile {
  float* q;       // [rows][head_dim], scaled
  float* out;     // [rows][head_dim]
  float* scores;  // [rows][kChunk]
  float max[kMostRows], sum[kMostRows];
  int64_t last[kMostRows];  // position of the row's token: the last one it sees
  int rows;
};

// scores[R][kWide vectors from `first`] = q k.
template <typename T, int R>
void score_rows(const Chunk<T>& chunk, const float* q, float* scores, int64_t dim, int first) {
  Vec sums[R][kWide];
  const T* keys[kWide];
#pragma GCC unroll 4
  for (int w = 0; w < kWide; ++w) {
    const int token = first + w * kLanes;
    keys[w] = chunk.keys[token / kRun] + token % kRun;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sums[r][w] = zero();
  }
  for (int64_t d = 0; d < dim; ++d) {
    Vec key[kWide];
#pragma GCC unroll 4
    for (int w = 0; w < kWide; ++w) key[w] = load(keys[w] + d * chunk.key_stride);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Vec value = set1(q[r * dim + d]);
#pragma GCC unroll 4
      for (int w = 0; w < kWide; ++w) sums[r][w] = fma(value, key[w], sums[r][w]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int w = 0; w < kWide; ++w) store(scores + r * kChunk + first + w * kLanes, sums[r][w]);
  }
}

// out[R][W vectors from dimension `first`] += scores[R][tokens] values; `n` lanes of each vector exist.
template <typename T, int R, int W>
void add_values(const Chunk<T>& chunk, const float* scores, float* out, int64_t dim, int64_t first, int tokens, int n) {
  Vec sums[R][W];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) sums[r][w] = load_n(out + r * dim + first + w * kLanes, n);
  }
  for (int t = 0; t < tokens; ++t) {
    Vec value[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      const T* at = chunk.values[t] + first + w * kLanes;
      value[w] = W > 1 ? load(at) : load_n(at, n);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Vec weight = set1(scores[r * kChunk + t]);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sums[r][w] = fma(weight, value[w], sums[r][w]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) store_n(out + r * dim + first + w * kLanes, sums[r][w], n);
  }
}

template <typename T, int R>
void attend_values(const Chunk<T>& chunk, const float* scores, float* out, int64_t dim, int tokens) {
  int64_t d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) {
    add_values<T, R, kWide>(chunk, scores, out, dim, d, tokens, kLanes);
  }
  for (; d < dim; d += kLanes) {
    add_values<T, R, 1>(chunk, scores, out, dim, d, tokens, static_cast<int>(least(kLanes, dim - d)));
  }
}

// Calls f with the number of rows as a constant.
template <int R, typename F>
inline void with_rows(int rows, const F& f) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, f);
  }
  f.template operator()<R>();
}

// Turns `valid` scores of a row into weights relative to the row's maximum so far; the rest of the chunk weighs 0.
void soften(Tile& tile, int row, int valid, int64_t dim) {
  float* scores = tile.scores + row * kChunk;
  Vec high = set1(-__builtin_inff());
  for (int t = 0; t < valid; t += kLanes) {
    const Vec x = load(scores + t);
    const Mask in = lanes_below(static_cast<int>(least(kLanes, valid - t)));
    high = max(high, select(in, x, high));
  }
  const float before = tile.max[row];
  const float top = reduce_max(high) > before ? reduce_max(high) : before;
  Vec total = zero();
  for (int t = 0; t < kChunk; t += kLanes) {
    const int n = valid - t < 0 ? 0 : static_cast<int>(least(kLanes, valid - t));
    const Vec weight = n == 0 ? zero() : select(lanes_below(n), exp(load(scores + t) - set1(top)), zero());
    store(scores + t, weight);
    total = total + weight;
  }
  tile.max[row] = top;
  if (top == before) {
    tile.sum[row] += reduce_sum(total);
    return;
  }
  const float shrink = first_lane(exp(set1(before - top)));
  tile.sum[row] = tile.sum[row] * shrink + reduce_sum(total);
  float* out = tile.out + row * dim;
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int n = static_cast<int>(least(kLanes, dim - d));
    store_n(out + d, load_n(out + d, n) * set1(shrink), n);
  }
}

template <typename T>
void attend_chunk(const Chunk<T>& chunk, Tile& tile, int64_t start, int64_t dim) {
  // Rows are in the order of their tokens: those that end before this chunk come first.
  int row = 0;
  while (row < tile.rows && tile.last[row] < start) ++row;
  for (; row < tile.rows; row += kRows) {
    const int rows = static_cast<int>(least(kRows, tile.rows - row));
    const int tokens = static_cast<int>(least(kChunk, tile.last[row + rows - 1] - start + 1));
    with_rows<kRows>(rows, [&]<int R>() {
      for (int first = 0; first < tokens; first += kWide * kLanes) {
        score_rows<T, R>(chunk, tile.q + row * dim, tile.scores + row * kChunk, dim, first);
      }
    });
    for (int r = row; r < row + rows; ++r) {
      soften(tile, r, static_cast<int>(least(kChunk, tile.last[r] - start + 1)), dim);
    }
    with_rows<kRows>(rows, [&]<int R>() {
      attend_values<T, R>(chunk, tile.scores + row * kChunk, tile.out + row * dim, dim, tokens);
    });
  }
}

// Where the chunk's keys and values lie; tokens from `count` on are never used, and point at the first.
template <typename T>
void find_chunk(const AttentionArgs& a, const int32_t* blocks, int64_t head, int64_t start, int64_t count, T* copy,
                Chunk<T>* chunk) {
  const int64_t size = a.block_size, cell = a.head_dim * size;
  const auto cell_at = [&](int64_t token) { return (blocks[token / size] * a.num_kv_heads + head) * cell; };
  const T* k_cache = static_cast<const T*>(a.k_cache);
  const T* v_cache = static_cast<const T*>(a.v_cache);
  for (int64_t t = 0; t < kChunk; ++t) {
    const int64_t token = start + (t < count ? t : 0);
    chunk->values[t] = v_cache + cell_at(token) + token % size * a.head_dim;
  }
  if (size % kRun == 0) {
    chunk->key_stride = size;
    for (int run = 0; run < kRuns; ++run) {
      const int64_t token = start + (run * kRun < count ? run * kRun : 0);
      chunk->keys[run] = k_cache + cell_at(token) + token % size;
    }
    return;
  }
  chunk->key_stride = kChunk;
  for (int run = 0; run < kRuns; ++run) chunk->keys[run] = copy + run * kRun;
  for (int64_t t = 0; t < count; ++t) {
    const T* key = k_cache + cell_at(start + t) + (start + t) % size;
    for (int64_t d = 0; d < a.head_dim; ++d) copy[d * kChunk + t] = key[d * size];
  }
}

// Rows of `tokens` queries from `first` of a request, for the query heads that read key head `head`.
template <typename T>
void attend_tile(const AttentionArgs& a, int64_t request, int64_t head, int64_t first, int64_t tokens, Tile& tile,
                 T* copy) {
  const int64_t dim = a.head_dim, group = a.q.num_heads / a.num_kv_heads;
  const int64_t begin = a.query_start_loc[request], queries = a.query_start_loc[request + 1] - begin;
  const int64_t offset = a.seq_lens[request] - queries;
  tile.rows = static_cast<int>(tokens * group);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t h = 0; h < group; ++h) {
      const int64_t row = token * group + h;
      const T* q = static_cast<const T*>(a.q.data) + (begin + first + token) * a.q.token_stride +
                   (head * group + h) * a.q.head_stride;
      for (int64_t d = 0; d < dim; d += kLanes) {
        const int n = static_cast<int>(least(kLanes, dim - d));
        store_n(tile.q + row * dim + d, load_n(q + d, n) * set1(a.scale), n);
        store_n(tile.out + row * dim + d, zero(), n);
      }
      tile.max[row] = -__builtin_inff();
      tile.sum[row] = 0.0f;
      tile.last[row] = offset + first + token;
    }
  }
  const int64_t end = offset + first + tokens;
  Chunk<T> chunk;
  for (int64_t start = 0; start < end; start += kChunk) {
    find_chunk(a, a.block_table + request * a.table_stride, head, start, least(kChunk, end - start), copy, &chunk);
    attend_chunk(chunk, tile, start, dim);
  }
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t place = (begin + first + row / group) * a.q.num_heads + head * group + row % group;
    T* out = static_cast<T*>(a.out) + place * dim;
    const Vec scale = set1(1.0f / tile.sum[row]);
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int n = static_cast<int>(least(kLanes, dim - d));
      store_n(out + d, load_n(tile.out + row * dim + d, n) * scale, n);
    }
  }
}

template <typename T>
void attend_all(const AttentionArgs& a) {
  const int64_t group = a.q.num_heads / a.num_kv_heads;
  const int64_t tile_tokens = group < kTileRows ? kTileRows / group : 1;
  const int64_t rows = tile_tokens * group;
  Scratch<int64_t> first_tile(a.requests + 1);
  first_tile[0] = 0;
  for (int64_t r = 0; r < a.requests; ++r) {
    const int64_t queries = a.query_start_loc[r + 1] - a.query_start_loc[r];
    first_tile[r + 1] = first_tile[r] + (queries + tile_tokens - 1) / tile_tokens;
  }
#pragma omp parallel
  {
    Scratch<float> memory(rows * (2 * a.head_dim + kChunk));
    Scratch<T> copy(a.block_size % kRun ? a.head_dim * kChunk : 0);
    Tile tile;
    tile.q = memory.get();
    tile.out = tile.q + rows * a.head_dim;
    tile.scores = tile.out + rows * a.head_dim;
    int64_t request = 0;
    // Tasks come in increasing order within a thread, so the request is found by walking on.
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < first_tile[a.requests] * a.num_kv_heads; ++task) {
      const int64_t index = task / a.num_kv_heads;
      while (first_tile[request + 1] <= index) ++request;
      const int64_t first = (index - first_tile[request]) * tile_tokens;
      const int64_t queries = a.query_start_loc[request + 1] - a.query_start_loc[request];
      attend_tile<T>(a, request, task % a.num_kv_heads, first, least(tile_tokens, queries - first), tile, copy.get());
    }
  }
}

}  // namespace

void paged_attention(const AttentionArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, attend_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
