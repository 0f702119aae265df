// linear_quantized_int8 in matrix tiles: a block of a row is a tile's step, and its codes are widened to unsigned bytes. Sums of a
// block are exact, and scaled and added up in the order of kernels/linear_quantized_int8.cpp: results are the same to the bit.
//
// Include only from kernels/*.cpp.
#pragma once

#include "byte_codes.h"
#include "tile_codes.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

struct CodesAsBytes {
  using Products = Int8ByUint8Products;
  static constexpr int64_t kUnitBytes = kByteUnitBytes;
  static WidenUnits widener(const LinearArgs& a) {
    WidenUnits widen = nullptr;
    with_byte_codes(a.quant, [&](auto* kind) { widen = &widen_units<std::remove_cvref_t<decltype(*kind)>>; });
    return widen;
  }

 private:
  template <typename C>
  static void widen_units(const LinearArgs&, const uint8_t* codes, int64_t units, uint8_t* to) {
    widen_to_bytes<C>(codes, units, to);
  }
};

template <typename T>
struct BytesTileProduct : CodesInTiles<CodesAsBytes> {
  using Row = T;
  using Element = int8_t;
  static_assert(UnitSteps::kUnits == kBlockUnits);

  // [blocks][rows][units][8]; of each block the rows' scales and where sums begin [blocks][rows]; the sums of groups
  // [groups][rows]; whole cache lines.
  static int64_t packed_row(const LinearArgs& a) {
    const UnitSteps blocks(a.quant);
    const int64_t size = blocks.count * (blocks.units * kUnit + 8) + a.quant.groups * 4;
    return (size + 63) / 64 * 64;
  }

  static void pack_row(const LinearArgs& a, const T* x, int64_t r, int64_t rows, int8_t* out) {
    const Quantized& q = a.quant;
    const UnitSteps blocks(q);
    const Infos infos(blocks, out, rows);
    int8_t* to = out + r * blocks.units * kUnit;
    int64_t at = r;
    for (int64_t g = 0; g < q.groups; ++g) {
      const int64_t end = least((g + 1) * q.group_size, a.inner);
      float sum = 0.0f;
      for (int64_t b = 0; b < blocks.of_group; ++b, at += rows, to += rows * blocks.units * kUnit) {
        const Rounded<1> block = round_block<1>(q, x, g * q.group_size + b * kBlockUnits * kUnit, end);
        for (int64_t u = 0; u < blocks.units; ++u) {
          const uint64_t unit = block.unit(q, 0, u);
          std::memcpy(to + u * kUnit, &unit, sizeof(unit));
        }
        infos.scales[at] = block.scale;
        infos.starts[at] = -constant_zero(q) * block.sums[0];
        sum += block.sum();
      }
      infos.sums[g * rows + r] = sum;
    }
  }

  template <int P>
  static void multiply_rows(const LinearArgs& a, const int8_t* x, int rows, int64_t row, int64_t panel, AheadOfTiles ahead) {
    const UnitSteps blocks(a.quant);
    const Infos infos(blocks, const_cast<int8_t*>(x), rows);
    for (int p = 0; p < P; ++p) {
      Vec totals[kMaxRows][2];
      std::memset(totals, 0, static_cast<size_t>(rows) * sizeof(totals[0]));
      const Prepared columns(a, panel + p);
      multiply_panel(a, x, rows, blocks.units * kUnit, 1, panel + p, ahead, [&](int64_t block, int count, const TileSums* sums) VLLM_INLINE {
        add_blocks(a.quant, blocks, infos, columns, block, count, sums, rows, totals[0]);
      });
      write_rows<T, 1>(a, totals[0], rows, row, panel + p, 0);
    }
  }

 private:
  struct Infos {
    float* scales;
    int32_t* starts;
    float* sums;
    Infos(const UnitSteps& blocks, int8_t* packed, int64_t rows)
        : scales(reinterpret_cast<float*>(packed + blocks.count * blocks.units * kUnit * rows)),
          starts(reinterpret_cast<int32_t*>(scales + blocks.count * rows)),
          sums(reinterpret_cast<float*>(starts + blocks.count * rows)) {}
  };

  static void add_blocks(const Quantized& q, const UnitSteps& blocks, const Infos& infos, const Prepared& columns,
                         int64_t block, int count, const TileSums* sums, int rows, Vec* totals) {
    Vec scales[kGroupsTogether][2];
    const bool offsets = has_offsets(q);
    for (int i = 0; i < count;) {
      // Offsets are added after their group's last block.
      const int together = offsets ? 1 : count;
      for (int j = 0; j < together; ++j) {
        const float* of_group = columns.scales + (block + i + j) / blocks.of_group * kPanel;
        scales[j][0] = load(of_group);
        scales[j][1] = load(of_group + 16);
      }
      const int64_t first = (block + i) * rows;
      add_scaled_integers(together, sums + i, scales, infos.scales + first, infos.starts + first, rows, totals);
      i += together;
      if (const int64_t group = (block + i) / blocks.of_group; offsets && (block + i) % blocks.of_group == 0) {
        add_offsets(columns.offsets + (group - 1) * kPanel, infos.sums + (group - 1) * rows, rows, totals);
      }
    }
  }

  static void add_offsets(const float* offsets, const float* row_sums, int rows, Vec* totals) {
    const Vec low = load(offsets), high = load(offsets + 16);
    for (int r = 0; r < rows; ++r, totals += 2) {
      const Vec sum = set1(row_sums[r]);
      totals[0] = fma(sum, low, totals[0]);
      totals[1] = fma(sum, high, totals[1]);
    }
  }
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
