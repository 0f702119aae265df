// The arithmetic of attention_tile.h for bfloat16 in matrix tiles, up to 16 rows at a time: scores and weighted values are
// their products, with float32 sums; what is between them is float32.
//
// A row's weights are rounded to bfloat16, and so is what they lack then; both are multiplied with the values, so that
// these get all but the last bits of the weights. A row's numbers are those of its own chain of operations: each row is
// multiplied in tiles, one alone, too, in tiles of one row.
//
// Include only from kernels/*.cpp.
#pragma once

#include "attention_tile.h"
#include "tile_lanes.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

// Tokens whose weights are one tile, for two tiles of scores.
constexpr int kTileTokens = 2 * kTileRows;

// Pairs from 16 values each: what a right tile's row consists of.
inline __m512i pairs_of(const BF16* even, const BF16* odd) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// The same where the second 16 lie behind the first.
inline __m512i pairs_of_neighbours(const BF16* values) {
  alignas(64) static constexpr uint8_t order[64] = {
      0,  1,  32, 33, 2,  3,  34, 35, 4,  5,  36, 37, 6,  7,  38, 39, 8,  9,  40, 41, 10, 11, 42, 43, 12, 13, 44, 45, 14, 15, 46, 47,
      16, 17, 48, 49, 18, 19, 50, 51, 20, 21, 52, 53, 22, 23, 54, 55, 24, 25, 56, 57, 26, 27, 58, 59, 28, 29, 60, 61, 30, 31, 62, 63};
  return _mm512_permutexvar_epi8(_mm512_load_si512(order), _mm512_loadu_si512(values));
}

// A chunk as right tiles.
struct TileChunk {
  uint32_t* keys;    // [inner / 2][kChunk] of two neighbouring dimensions; those beyond head_dim are zeros
  uint32_t* values;  // [kChunk / 2][dim] of two tokens: row 16 i + t has tokens 32 i + t and 32 i + t + 16

  // The value of a token is at [0], [2] and so on.
  BF16* value(int64_t token, int64_t dim) const {
    const int64_t row = token / kTileTokens * kTileRows + token % kTileRows;
    return reinterpret_cast<BF16*>(values + row * dim) + token % kTileTokens / kTileRows;
  }
};

// Head_dim as left tiles have it.
inline int64_t tile_inner(int64_t dim) { return (dim + kTileInner - 1) / kTileInner * kTileInner; }

// Values of the 32 tokens from `token` on, of which value_at(t) is the one of token + t; null stands for zeros.
template <typename At>
inline void pack_values(const TileChunk& chunk, int64_t token, int64_t dim, const At& value_at) {
  for (int t = 0; t < kTileRows; ++t) {
    const BF16 *even = value_at(t), *odd = value_at(t + kTileRows);
    uint32_t* to = chunk.values + (token / 2 + t) * dim;
    for (int64_t d = 0; d < dim; d += kTileRows) {
      alignas(32) static constexpr BF16 none[kTileRows] = {};
      _mm512_storeu_si512(to + d, pairs_of(even ? even + d : none, odd ? odd + d : none));
    }
  }
}

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
  for (int t = from / kTileTokens * kTileTokens; t < tokens; t += kTileTokens) {
    load_tile<4>(weights + t, kChunk * sizeof(float));
    load_tile<5>(weights + t + kTileRows, kChunk * sizeof(float));
    unroll<N>([&](auto n) VLLM_INLINE {
      load_tile<6 + n % 2>(values + t / 2 * dim + n * kTileRows, row);
      add_bf16_products<n, 4, 6 + n % 2>();
      add_bf16_products<n, 5, 6 + n % 2>();
    });
  }
  unroll<N>([&](auto n) VLLM_INLINE { store_tile<n>(out + n * kTileRows, row); });
}

// Nearest bfloat16, as float32.
[[gnu::always_inline]] inline __m512i to_bf16(Vec x) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x.v), half), upper);
}

// Pairs of numbers that are bfloat16.
[[gnu::always_inline]] inline void store_pairs(float* to, __m512i even, __m512i odd) {
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
}

// As soften, of `factor` times the scores; `tokens` is a multiple of 32, in whose place come 16 pairs of rounded weights and
// 16 of what these lack.
template <int R>
[[gnu::noinline]] void soften_tile(float* scores, const int* from, const int* valid, int tokens, float factor, float* out,
                                   float* row_max, float* sums, int64_t dim, bool fresh) {
  Vec top[R], total[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    total[r] = fresh ? zero() : load(sums + r * kLanes);
    raise_top(scores + r * kChunk, from[r], valid[r], tokens, set1(factor), out + r * dim, row_max + r, &total[r], dim, fresh);
    top[r] = zero() - set1(row_max[r]);
  }
  for (int t = 0; t < tokens; t += kTileTokens) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* at = scores + r * kChunk + t;
      const Vec even = exp2(fma(load(at), set1(factor), top[r])), odd = exp2(fma(load(at + kLanes), set1(factor), top[r]));
      total[r] = total[r] + even + odd;
      const __m512i e = to_bf16(even), o = to_bf16(odd);
      store_pairs(at, e, o);
      store_pairs(at + kLanes, to_bf16(even - Vec{_mm512_castsi512_ps(e)}), to_bf16(odd - Vec{_mm512_castsi512_ps(o)}));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) store(sums + r * kLanes, total[r]);
}

// A thread's tiles: 0 to 3 are sums; 4 and 5 rows; 6 and 7 columns.
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
  void attend(const TileChunk& chunk, const BF16* q, int rows, int64_t inner, int64_t dim, const int* from, const int* valid,
              int tokens, float factor, bool adjusts, const Adjust& adjust, float* scores, float* out, float* row_max, float* sums,
              bool fresh) {
    shape(rows);
    tokens = (tokens + kTileTokens - 1) / kTileTokens * kTileTokens;
    if (tokens > kTileTokens) {
      score_tiles<4>(chunk.keys, q, inner, scores);
    } else {
      score_tiles<2>(chunk.keys, q, inner, scores);
    }
    for (int r = 0; r < rows && adjusts; ++r) {
      float* row = scores + r * kChunk;
      scale_into(row, row, set1(factor), tokens);
      adjust(row, r, tokens);
    }
    if (adjusts) factor = 1.0f;
    for (int r = 0; r < rows; r += kAbreast) {
      with_rows<kAbreast>(static_cast<int>(least(kAbreast, rows - r)), [&]<int R>() {
        soften_tile<R>(scores + r * kChunk, from + r, valid + r, tokens, factor, out + r * dim, row_max + r,
                       sums + r * kLanes, dim, fresh);
      });
    }
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
  // Rows whose weights are computed side by side.
  static constexpr int kAbreast = 4;

  void shape(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    TileShapes shapes;
    for (int tile = 0; tile < 6; ++tile) shapes.set(tile, rows);
    shapes.set(6, kTileRows);
    shapes.set(7, kTileRows);
    configure_tiles(shapes);
  }

  int rows_ = 0;
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
