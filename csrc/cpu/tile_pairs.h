// Products of bfloat16 in matrix tiles with a quantised weight whose values are bfloat16 to the bit: codes are widened to pairs
// (see pair_codes.h), and a group's sums are multiplied with its scales.
//
// Include only from kernels/*.cpp.
#pragma once

#include "pair_codes.h"
#include "tile_codes.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

struct CodesAsPairs {
  using Products = Bf16Products;
  static constexpr int64_t kUnitBytes = ::vllm_cpu::VLLM_ISA::kUnitBytes;
  static WidenUnits widener(const LinearArgs& a) {
    WidenUnits widen = nullptr;
    // No sums are in registers meanwhile.
    with_pair_codes<1>(a.quant, [&](auto* kind) { widen = &widen_pairs<std::remove_cvref_t<decltype(*kind)>>; });
    return widen;
  }
};

struct PairsTileProduct : CodesInTiles<CodesAsPairs> {
  using Row = BF16;
  using Element = BF16;

  // [steps][rows][units][8], then the sums of groups as floats [groups][rows]; whole cache lines.
  static int64_t packed_row(const LinearArgs& a) {
    return (packed_inner(a.quant) + 2 * a.quant.groups + kTileInner - 1) / kTileInner * kTileInner;
  }

  static void pack_row(const LinearArgs& a, const BF16* x, int64_t r, int64_t rows, BF16* out) {
    const Quantized& q = a.quant;
    const UnitSteps steps(q);
    const bool in_words = pairs_in_words(q);
    float* sums = sums_of(q, out, rows) + r;
    BF16* to = out + r * steps.units * kUnit;
    for (int64_t g = 0; g < q.groups; ++g, sums += rows) {
      const int64_t end = least((g + 1) * q.group_size, a.inner);
      int64_t k = g * q.group_size;
      SumOfRow sum;
      for (int64_t step = 0; step < steps.of_group; ++step, to += rows * steps.units * kUnit) {
        for (int64_t u = 0; u < steps.units; ++u, k += kUnit) {
          const UnitOfRow unit(q, x, k, end, in_words);
          _mm_storeu_si128((__m128i*)(to + u * kUnit), unit.pairs);
          sum.add(unit.values);
        }
      }
      *sums = sum.total();
    }
  }

  template <int P>
  static void multiply_rows(const LinearArgs& a, const BF16* x, int rows, int64_t row, int64_t panel, AheadOfTiles ahead) {
    const UnitSteps steps(a.quant);
    const int64_t bytes = steps.units * kUnit * int64_t{sizeof(BF16)};
    const bool offsets = has_offsets(a.quant);
    const float* row_sums = sums_of(a.quant, const_cast<BF16*>(x), rows);
    for (int p = 0; p < P; ++p) {
      Vec totals[kMaxRows][2];
      std::memset(totals, 0, static_cast<size_t>(rows) * sizeof(totals[0]));
      const Prepared columns(a, panel + p);
      multiply_panel(a, x, rows, bytes, steps.of_group, panel + p, ahead, [&](int64_t group, int count, const TileSums* sums) VLLM_INLINE {
        const int64_t at = group * kPanel;
        add_scaled_floats(count, offsets, sums, columns.scales + at, columns.offsets + at, row_sums + group * rows, rows, totals[0]);
      });
      write_rows<BF16, 1>(a, totals[0], rows, row, panel + p, 0);
    }
  }

 private:
  static int64_t packed_inner(const Quantized& q) { return UnitSteps(q).count * UnitSteps(q).units * kUnit; }
  static float* sums_of(const Quantized& q, BF16* packed, int64_t rows) {
    return reinterpret_cast<float*>(packed + packed_inner(q) * rows);
  }
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
