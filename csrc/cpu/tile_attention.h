// The arithmetic of attention_tile.h for bfloat16 in matrix tiles, up to 16 rows at a time: scores and weighted values are
// their products, over the words of a WidePairChunk, with keys' dimensions beyond head_dim zero and zeros beside the values
// of a chunk that is not full, as a right tile has 32 tokens.
//
// A row's numbers are those of its own chain of operations: each row is multiplied in tiles, one alone, too, in tiles of
// one row.
//
// Include only from kernels/*.cpp.
#pragma once

#include "attention_tile.h"
#include "tile_lanes.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

// Head_dim as left tiles have it.
inline int64_t tile_inner(int64_t dim) { return (dim + kTileInner - 1) / kTileInner * kTileInner; }

// scores[N tiles of 16 tokens] = q k, of as many rows as the tiles have.
template <int N>
inline void score_tiles(const uint32_t* keys, const BF16* q, int64_t inner, float* scores) {
  unroll<N>([&](auto n) VLLM_INLINE { zero_tile<n>(); });
  for (int64_t d = 0; d < inner; d += kTileInner) {
    load_tile<4>(q + d, inner * sizeof(BF16));
    unroll<N>([&](auto n) VLLM_INLINE {
      load_tile<6 + n % 2>(keys + d / 2 * kChunk + n * kTileRows, kChunk * sizeof(float));
      add_bf16_products<n, 4, 6 + n % 2>();
    });
  }
  unroll<N>([&](auto n) VLLM_INLINE { store_tile<n>(scores + n * kTileRows, kChunk * sizeof(float)); });
}

// out[N tiles of 16 dimensions] += weights values, of the tokens from `from` on; `fresh`: there is nothing in `out` yet.
template <int N>
inline void add_value_tiles(const uint32_t* values, const float* weights, float* out, int64_t dim, int from, int tokens,
                            bool fresh) {
  const int64_t row = dim * sizeof(float);
  unroll<N>([&](auto n) VLLM_INLINE {
    if (fresh) {
      zero_tile<n>();
    } else {
      load_tile<n>(out + n * kTileRows, row);
    }
  });
  for (int t = from / kTileInner * kTileInner; t < tokens; t += kTileInner) {
    load_tile<4>(weights + t / 2, kChunk * sizeof(float));
    unroll<N>([&](auto n) VLLM_INLINE {
      load_tile<6 + n % 2>(values + t / 2 * dim + n * kTileRows, row);
      add_bf16_products<n, 4, 6 + n % 2>();
    });
  }
  unroll<N>([&](auto n) VLLM_INLINE { store_tile<n>(out + n * kTileRows, row); });
}

// In its life numbers below the smallest normal one count as zero, as they do to matrix tiles.
class Flushing {
 public:
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~Flushing() { _mm_setcsr(before_); }
  Flushing(const Flushing&) = delete;

 private:
  const unsigned before_;
};

// The sums of add_bf16_products for one row and 16 columns, a word of either at a time.
struct PairSums {
  Vec even = zero(), odd = zero();
  void add(uint32_t row, __m512i columns) {
    const auto upper = [](uint32_t word) { return Vec{_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(word)))}; };
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    even = fma(upper(row << 16), Vec{_mm512_castsi512_ps(_mm512_slli_epi32(columns, 16))}, even);
    odd = fma(upper(row & 0xffff0000u), Vec{_mm512_castsi512_ps(_mm512_and_si512(columns, high))}, odd);
  }
  Vec total() const { return even + odd; }
};

// score_tiles of R rows without tiles, the same to the bit while numbers are flushed: a few rows would wait longer for a matrix unit
// that has fallen asleep, as it does within a microsecond. Two vectors of tokens at a time; fetches the next chunk.
template <int R>
[[gnu::noinline]] void score_few(const PairChunk& chunk, const BF16* q, int64_t inner, int64_t dim, int tokens, float* scores) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(q);
  for (int first = 0; first < tokens; first += 2 * kLanes) {
    Vec totals[R][2];
    unroll<R>([&](int r) VLLM_INLINE { totals[r][0] = totals[r][1] = zero(); });
    for (int64_t from = 0; from < dim / 2; from += kTileRows) {
      PairSums sums[R][2];
      for (int64_t pair = from; pair < least(from + kTileRows, dim / 2); ++pair) {
        chunk.fetch_next_pair(first / kRun, pair);
        chunk.fetch_next_pair(first / kRun + 1, pair);
        const __m512i low = (__m512i)chunk.key_pair(first, pair), high = (__m512i)chunk.key_pair(first + kLanes, pair);
        unroll<R>([&](int r) VLLM_INLINE {
          sums[r][0].add(words[r * inner / 2 + pair], low);
          sums[r][1].add(words[r * inner / 2 + pair], high);
        });
      }
      unroll<R>([&](int r) VLLM_INLINE {
        totals[r][0] = totals[r][0] + sums[r][0].total();
        totals[r][1] = totals[r][1] + sums[r][1].total();
      });
    }
    unroll<R>([&](int r) VLLM_INLINE {
      store(scores + r * kChunk + first, totals[r][0]);
      store(scores + r * kChunk + first + kLanes, totals[r][1]);
    });
  }
}

// add_value_tiles likewise, of the tokens from `seen` to `count` alone, and of W vectors of dimensions from `first` on.
template <int R, int W>
inline void add_few(const PairChunk& chunk, const float* weights, float* out, int64_t dim, int64_t first, int from, int tokens,
                    int64_t seen, int64_t count, bool fresh) {
  Vec totals[R][W];
  unroll<R>([&](int r) VLLM_INLINE {
    unroll<W>([&](int w) VLLM_INLINE { totals[r][w] = fresh ? zero() : load(out + r * dim + first + w * kLanes); });
  });
  for (int begin = from / kTileInner * kTileInner; begin < tokens; begin += kTileInner) {
    PairSums sums[R][W];
    for (int t = begin; t < begin + kTileInner; t += 2) {
      const auto mask = [&](int64_t token, uint32_t bits) { return token >= seen && token < count ? bits : 0u; };
      const uint32_t is_seen = mask(t, 0xffffu) | mask(t + 1, 0xffff0000u);
      __m512i values[W];
      unroll<W>([&](int w) VLLM_INLINE { values[w] = (__m512i)chunk.value_pair(t, dim, first + w * kLanes, kLanes, is_seen); });
      unroll<R>([&](int r) VLLM_INLINE {
        uint32_t weight;
        std::memcpy(&weight, weights + r * kChunk + t / 2, sizeof(weight));
        unroll<W>([&](int w) VLLM_INLINE { sums[r][w].add(weight, values[w]); });
      });
    }
    unroll<R>([&](int r) VLLM_INLINE {
      unroll<W>([&](int w) VLLM_INLINE { totals[r][w] = totals[r][w] + sums[r][w].total(); });
    });
  }
  unroll<R>([&](int r) VLLM_INLINE {
    unroll<W>([&](int w) VLLM_INLINE { store(out + r * dim + first + w * kLanes, totals[r][w]); });
  });
}

template <int R>
[[gnu::noinline]] void add_few_values(const PairChunk& chunk, const float* weights, float* out, int64_t dim, int from, int tokens,
                                      int64_t seen, int64_t count, bool fresh) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) add_few<R, 2>(chunk, weights, out, dim, d, from, tokens, seen, count, fresh);
  if (d < dim) add_few<R, 1>(chunk, weights, out, dim, d, from, tokens, seen, count, fresh);
}

// Turns rows' scores [rows][kChunk] into words of weights, as soften_pairs does; the other arguments are those of
// AttentionTiles::attend.
template <typename Adjust>
inline void soften_rows(float* scores, int rows, const int* from, const int* valid, int tokens, float factor, bool adjusts,
                        const Adjust& adjust, float* out, float* row_max, float* sums, int64_t dim, bool fresh) {
  for (int r = 0; r < rows && adjusts; ++r) {
    float* row = scores + r * kChunk;
    scale_into(row, row, set1(factor), tokens);
    adjust(row, r, tokens);
  }
  if (adjusts) factor = 1.0f;
  // Rows whose weights are computed side by side.
  constexpr int kAbreast = 4;
  for (int r = 0; r < rows; r += kAbreast) {
    with_rows<kAbreast>(static_cast<int>(least(kAbreast, rows - r)), [&]<int R>() {
      soften_pairs<R>(scores + r * kChunk, from + r, valid + r, tokens, factor, out + r * dim, row_max + r, sums + r * kLanes,
                      dim, fresh);
    });
  }
}

// AttentionTiles::attend of R rows without tiles, of a chunk as it lies in the cache whose tokens from `seen` to `count` are there.
template <int R, typename Adjust>
void attend_few(const PairChunk& chunk, const BF16* q, int64_t inner, int64_t dim, const int* from, const int* valid, int tokens,
                int64_t seen, int64_t count, float factor, bool adjusts, const Adjust& adjust, float* scores, float* out,
                float* row_max, float* sums, bool fresh) {
  tokens = static_cast<int>(round_up_weights(tokens));
  {
    const Flushing flushing;
    score_few<R>(chunk, q, inner, dim, tokens, scores);
  }
  soften_rows(scores, R, from, valid, tokens, factor, adjusts, adjust, out, row_max, sums, dim, fresh);
  const Flushing flushing;
  add_few_values<R>(chunk, scores, out, dim, from[0], tokens, seen, count, fresh);
}

// A thread's tiles: 0 to 3 are sums; 4 rows; 6 and 7 columns.
class AttentionTiles {
 public:
  AttentionTiles() = default;
  AttentionTiles(const AttentionTiles&) = delete;
  ~AttentionTiles() {
    if (rows_) release_tiles();
  }

  // Lets up to 16 rows attend a chunk: q [rows][inner], scores [16][kChunk] to work in; the others as in attention_tile.h, with
  // values of `dim`.
  // Where it `adjusts`, adjust(scores, r, tokens) changes those of row r, which are in units of log2 then.
  template <typename Adjust>
  void attend(const WidePairChunk& chunk, const BF16* q, int rows, int64_t inner, int64_t dim, const int* from, const int* valid,
              int tokens, float factor, bool adjusts, const Adjust& adjust, float* scores, float* out, float* row_max, float* sums,
              bool fresh) {
    shape(rows);
    tokens = static_cast<int>(round_up_weights(tokens));
    if (tokens > kWeightsAtOnce) {
      score_tiles<4>(chunk.keys, q, inner, scores);
    } else {
      score_tiles<2>(chunk.keys, q, inner, scores);
    }
    soften_rows(scores, rows, from, valid, tokens, factor, adjusts, adjust, out, row_max, sums, dim, fresh);
    // About as many tiles of sums each time.
    const int64_t tiles = dim / kTileRows, parts = (tiles + 3) / 4;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = tiles * part / parts, count = tiles * (part + 1) / parts - first, d = first * kTileRows;
      with_rows<4>(static_cast<int>(count), [&]<int N>() {
        add_value_tiles<N>(chunk.values + d, scores, out + d, dim, from[0], tokens, fresh);
      });
    }
  }

 private:
  void shape(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    TileShapes shapes;
    for (int tile = 0; tile < 5; ++tile) shapes.set(tile, rows);
    shapes.set(6, kTileRows);
    shapes.set(7, kTileRows);
    configure_tiles(shapes);
  }

  int rows_ = 0;
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
