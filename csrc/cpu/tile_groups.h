// Products in matrix tiles whose sums of each group of k are scaled: of bytes, and of codes whose scales are groups'. A group's
// sums begin at zero, and groups are added up in float32, in order, whatever the number of rows: a row's results do not depend
// on the other rows of the batch.
//
// Include only from kernels/*.cpp.
#pragma once

#include "tile_product.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

// Bytes of a panel's row of pairs, or of four bytes, of 32 columns.
constexpr int64_t kTileStride = kPanel * 4;

// The multiplied values, four bytes a column: add<sums, left, right>().
struct Bf16Products {
  using Sum = float;
  template <int sums, int left, int right>
  [[gnu::always_inline]] static void add() {
    add_bf16_products<sums, left, right>();
  }
};
struct Int8ByUint8Products {
  using Sum = int32_t;
  template <int sums, int left, int right>
  [[gnu::always_inline]] static void add() {
    add_int8_by_uint8_products<sums, left, right>();
  }
};

// Groups whose sums are added to the totals together: for fewer, loads and stores of totals take longer than tiles.
constexpr int kGroupsTogether = 2;

// A group's sums: of a row a vector of columns of each half of a panel.
using TileSums = Vec[2 * kTileRows][2];

// Packed rows of x, in steps of k that a tile holds: [steps][rows][bytes].
struct TileRows {
  const void* x;
  int rows;
  int64_t bytes;     // of a step
  int64_t steps;     // in all
  int64_t of_group;  // steps; the last group may have fewer
};

// Multiplies rows with a panel. panel_at(step) is where the panel has its values of step `step`, [bytes / 4][32] of four
// bytes; it is called once a step, in order. add(group, count, sums) is called for all groups, up to kGroupsTogether at once,
// in order, with the first of their sums.
//
// While tiles are multiplied the groups before them are added: sums are in memory by then, whence no load waits for a tile's
// store.
template <typename Products, typename PanelAt, typename Add>
[[gnu::always_inline]] inline void multiply_groups(const TileRows& of, const PanelAt& panel_at, const Add& add) {
  alignas(64) TileSums sums[2][kGroupsTogether];
  const bool two = of.rows > kTileRows;
  const char* x = static_cast<const char*>(of.x);
  RowTiles& tiles = row_tiles();
  tiles.shape(of.rows, of.bytes);
  int64_t before = 0;
  int turn = 0, waiting = 0, ready = 0;
  for (int64_t step = 0; step < of.steps;) {
    RowTiles::zero();
    const int64_t stop = least(step + of.of_group, of.steps);
    for (; step < stop; ++step, x += of.rows * of.bytes) {
      const uint8_t* panel = panel_at(step);
      load_tile<4>(x, of.bytes);
      load_tile<6>(panel, kTileStride);
      Products::template add<0, 4, 6>();
      load_tile<7>(panel + kTileBytes, kTileStride);
      Products::template add<1, 4, 7>();
      if (two) {
        load_tile<5>(x + kTileRows * of.bytes, of.bytes);
        Products::template add<2, 5, 6>();
        Products::template add<3, 5, 7>();
      }
    }
    Vec(*to)[2] = sums[turn][waiting++];
    store_tile<0>(to, kTileStride);
    store_tile<1>(to[0] + 1, kTileStride);
    if (two) {
      store_tile<2>(to[kTileRows], kTileStride);
      store_tile<3>(to[kTileRows] + 1, kTileStride);
    }
    if (waiting < kGroupsTogether && step < of.steps) continue;
    if (ready > 0) add(before, ready, sums[1 - turn]);
    before += ready;
    ready = waiting;
    waiting = 0;
    turn = 1 - turn;
  }
  add(before, ready, sums[1 - turn]);
}

// totals [rows][2] += sums times the columns' scales [count][2], and rows' sums of x [count][rows] times offsets [count][2].
template <int kCount, bool kOffsets>
[[gnu::noinline]] void add_groups_of_floats(const TileSums* sums, const float* scales, const float* offsets,
                                            const float* row_sums, int rows, Vec* totals) {
  Vec scale[kCount][2], offset[kCount][2];
  unroll<2 * kCount>([&](auto i) VLLM_INLINE {
    scale[i / 2][i % 2] = load(scales + 16 * i);
    if constexpr (kOffsets) offset[i / 2][i % 2] = load(offsets + 16 * i);
  });
  for (int r = 0; r < rows; ++r, totals += 2) {
    unroll<2>([&](auto half) VLLM_INLINE {
      Vec total = totals[half];
      unroll<kCount>([&](auto i) VLLM_INLINE {
        total = fma(sums[i][r][half], scale[i][half], total);
        if constexpr (kOffsets) total = fma(set1(row_sums[i * rows + r]), offset[i][half], total);
      });
      totals[half] = total;
    });
  }
}

inline void add_scaled_floats(int count, bool has_offsets, const TileSums* sums, const float* scales, const float* offsets,
                              const float* row_sums, int rows, Vec* totals) {
  constexpr int kAll = kGroupsTogether;
  const auto add = has_offsets ? (count == kAll ? &add_groups_of_floats<kAll, true> : &add_groups_of_floats<1, true>)
                               : (count == kAll ? &add_groups_of_floats<kAll, false> : &add_groups_of_floats<1, false>);
  add(sums, scales, offsets, row_sums, rows, totals);
}

// totals [rows][2] += sums of integers, from their rows' `starts` on, times the columns' scales and the rows'. `scales`:
// [count][2] of the columns. Rows' numbers are [count][rows].
template <int kCount>
[[gnu::noinline]] void add_groups_of_integers(const TileSums* sums, const Vec (*scales)[2], const float* row_scales,
                                              const int32_t* starts, int rows, Vec* totals) {
  Vec scale[kCount][2];
  unroll<2 * kCount>([&](auto i) VLLM_INLINE { scale[i / 2][i % 2] = scales[i / 2][i % 2]; });
  for (int r = 0; r < rows; ++r, totals += 2) {
    unroll<2>([&](auto half) VLLM_INLINE {
      Vec total = totals[half];
      unroll<kCount>([&](auto i) VLLM_INLINE {
        const __m512i sum = _mm512_add_epi32(_mm512_load_si512(&sums[i][r][half]), _mm512_set1_epi32(starts[i * rows + r]));
        total = fma(Vec{_mm512_cvtepi32_ps(sum)} * scale[i][half], set1(row_scales[i * rows + r]), total);
      });
      totals[half] = total;
    });
  }
}

inline void add_scaled_integers(int count, const TileSums* sums, const Vec (*scales)[2], const float* row_scales,
                                const int32_t* starts, int rows, Vec* totals) {
  const auto add = count == kGroupsTogether ? &add_groups_of_integers<kGroupsTogether> : &add_groups_of_integers<1>;
  add(sums, scales, row_scales, starts, rows, totals);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
