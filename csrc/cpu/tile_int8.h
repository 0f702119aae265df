// linear_int8 in matrix tiles: four k of 32 columns are two halves of a right tile's row as they lie in a panel, and 16 of
// such rows, a block, a tile. Activations are the signed side, and integers plus 128 the unsigned one, as with AVX512-VNNI;
// sums of a group are exact, and scaled and added up in the same order: results are the same to the bit.
//
// Include only from kernels/*.cpp.
#pragma once

#include "int8_panels.h"
#include "tile_groups.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

template <typename T>
struct Int8TileProduct {
  using Row = T;
  using Element = int8_t;
  static constexpr int kMaxRows = 2 * kTileRows;
  static constexpr int64_t kPanelsAtATime = 8;

  static constexpr int panels_at_once(int) { return 1; }

  static int64_t panel_size(const LinearArgs& a) { return int8::panel_bytes(a); }

  // [blocks][rows][64], then of each group the rows' scales and where sums begin [groups][rows]; whole cache lines.
  static int64_t packed_row(const LinearArgs& a) {
    const int64_t infos = int8::num_groups(a) * int64_t{sizeof(float) + sizeof(int32_t)};
    return int8::num_blocks(a) * int8::kBlock + (infos + 63) / 64 * 64;
  }

  static void pack_row(const LinearArgs& a, const T* x, int64_t r, int64_t rows, int8_t* out) {
    const Infos infos(a, out, rows);
    int8_t* to = out + r * int8::kBlock;
    int64_t at = r;
    int8::rotate_row(a, x, [&](const int8::Rotated& rotated, int block, int blocks) {
      const int group = block / int8::kGroupBlocks;
      __m512i sums = _mm512_setzero_si512();
      for (int b = 0; b < blocks; ++b, to += rows * int8::kBlock) {
        const __m512i bytes = int8::round_block(rotated.values[block + b], rotated.inverse(group));
        _mm512_storeu_si512(to, bytes);
        sums = _mm512_add_epi64(sums, int8::sum_shifted(bytes));
      }
      infos.scales[at] = rotated.scale(group);
      infos.starts[at] = int8::start_of_sums(_mm512_reduce_add_epi64(sums), blocks);
      at += rows;
    });
  }

  template <int P>
  static void multiply_rows(const LinearArgs& a, const int8_t* x, int rows, int64_t row, int64_t panel, AheadOfTiles ahead) {
    for (int p = 0; p < P; ++p) {
      Vec totals[kMaxRows][2];
      std::memset(totals, 0, static_cast<size_t>(rows) * sizeof(totals[0]));
      add_products(a, x, rows, panel + p, ahead, totals[0]);
      write_rows<T, 1>(a, totals[0], rows, row, panel + p, 0);
    }
  }

  static void finish() { row_tiles().release(); }

 private:
  // How far ahead to fetch weights: what the hardware fetches by itself stops at each page.
  static constexpr int64_t kAhead = 2 * int8::kBytesOfBlock;

  struct Infos {
    float* scales;
    int32_t* starts;
    Infos(const LinearArgs& a, const int8_t* packed, int64_t rows)
        : scales(reinterpret_cast<float*>(const_cast<int8_t*>(packed) + int8::num_blocks(a) * int8::kBlock * rows)),
          starts(reinterpret_cast<int32_t*>(scales + int8::num_groups(a) * rows)) {}
  };

  // Whatever x's dtype is.
  static void add_products(const LinearArgs& a, const int8_t* x, int rows, int64_t panel, AheadOfTiles ahead, Vec* totals) {
    const uint8_t* weight = int8::panel_of(a, panel);
    const uint8_t* scales = weight + int8::num_blocks(a) * int8::kBytesOfBlock;
    const Infos infos(a, x, rows);
    multiply_groups<Int8ByUint8Products>(
        {x, rows, int8::kBlock, int8::num_blocks(a), int8::kGroupBlocks},
        [&](int64_t block) VLLM_INLINE {
          ahead(int8::kBlock / kRun);
          const uint8_t* at = weight + block * int8::kBytesOfBlock;
          for (int64_t i = 0; i < int8::kBytesOfBlock; i += 64) __builtin_prefetch(at + kAhead + i);
          return at;
        },
        [&](int64_t group, int count, const TileSums* sums) VLLM_INLINE {
          Vec columns[kGroupsTogether][2];
          for (int i = 0; i < count; ++i) {
            const uint8_t* of_group = scales + (group + i) * int8::kScaleBytes;
            columns[i][0] = int8::load_scales(of_group, 0, 0);
            columns[i][1] = int8::load_scales(of_group, 0, 1);
          }
          add_scaled_integers(count, sums, columns, infos.scales + group * rows, infos.starts + group * rows, rows, totals);
        });
  }
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
