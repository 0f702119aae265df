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
    for (int r = 0; r < rows && adjusts; ++r) {
      float* row = scores + r * kChunk;
      scale_into(row, row, set1(factor), tokens);
      adjust(row, r, tokens);
    }
    if (adjusts) factor = 1.0f;
    for (int r = 0; r < rows; r += kAbreast) {
      with_rows<kAbreast>(static_cast<int>(least(kAbreast, rows - r)), [&]<int R>() {
        soften_pairs<R>(scores + r * kChunk, from + r, valid + r, tokens, factor, out + r * dim, row_max + r,
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
