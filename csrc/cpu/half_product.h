// Products of bfloat16 in float16 arithmetic, for the level that has it.
//
// Include only from kernels/*.cpp.
#pragma once

#include "gemm.h"
#include "half_lanes.h"
#include "left_rows.h"

#if defined(VLLM_HAS_HALF_LANES)
namespace vllm_cpu {
namespace VLLM_ISA {

// Products of bfloat16 in float16 arithmetic, which runs at twice the rate of float32. Rows of x and columns of W are
// scaled by powers of two into float16's range, where bfloat16's 8 bits are exact over 18 binades and more. Chains of
// kRun multiply-adds are summed pairwise, in float16 up to kHalfSum values of k and in float32 beyond: 40 % of the error
// that rounding the result to bfloat16 makes anyway. Nothing can overflow: sums of 64 are below (2^5 - 2^-3) * 2^5 * 64, as
// bfloat16 below 2^5 are at most 2^5 - 2^-3, and what their roundings add leaves them below float16's greatest number.
//
// A float16 sum keeps 11 bits of the greatest product in it. Rows with many values so much smaller that most of their bits
// would go (see loses) are left to a product with float32 sums; in others the usual values outweigh the sums' errors.
// Values below 2^-21 of a row's greatest, and weights below 2^-21 of their column's, keep fewer than 8 bits.
struct HalfProduct {
  using Row = BF16;
  // A value twice: broadcasting 32 bits is free, 16 bits are not.
  using Element = uint32_t;
  static constexpr int kMaxRows = 13;
  static constexpr int64_t kPanelsAtATime = 8;
  static constexpr int kHalfSum = 64;
  static constexpr int kRowExponent = 4;
  // Rows of a panel to fetch ahead: what the hardware fetches by itself stops at each page.
  static constexpr int kRowsAhead = 48;

  static constexpr int panels_at_once(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

  static int64_t panel_size(const LinearArgs& a) { return a.inner * kPanel * sizeof(_Float16); }

  // The last kRun hold the inverse of the row's scale (see pack_values).
  static int64_t packed_row(const LinearArgs& a) { return filled_up(a.inner) + kRun; }

  static void pack_row(const LinearArgs& a, const BF16* x, int64_t r, int64_t rows, uint32_t* out) {
    pack_values(x, a.inner, r, rows, out);
  }

  static void leave_row(const LinearArgs& a, const BF16* x, int64_t row) {
    if (loses(x, a.inner)) mark_left(a, x, row);
  }

  // Whether float16 sums would lose a row's usual values: more than a quarter of those that are not zero are below 2^-8 of
  // the greatest among the kHalfSum that are summed together, or below 2^-20 of the row's. Activations of texts hardly have
  // such rows: none in most layers, one in a hundred where a gate's products have the widest range.
  static bool loses(const BF16* x, int64_t size) {
    constexpr int kBinade = 1 << 7;
    const __m512i below_sum = _mm512_set1_epi16(8 * kBinade), below_row = _mm512_set1_epi16(20 * kBinade);
    const __m512i floor = _mm512_subs_epu16(_mm512_set1_epi16(static_cast<int16_t>(greatest_bits(x, size))), below_row);
    int64_t present = 0, lost = 0;
    for (int64_t k = 0; k < size; k += kHalfSum) {
      const __m512i parts[2] = {magnitudes(x, k, size), magnitudes(x, k + 32, size)};
      const __m512i greatest = repeat_greatest(_mm512_max_epu16(parts[0], parts[1]));
      const __m512i least_kept = _mm512_max_epu16(_mm512_subs_epu16(greatest, below_sum), floor);
      for (const __m512i& part : parts) {
        const __mmask32 there = _mm512_test_epi16_mask(part, part);
        present += __builtin_popcount(there);
        lost += __builtin_popcount(_mm512_mask_cmplt_epu16_mask(there, part, least_kept));
      }
    }
    return 4 * lost > present;
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const uint32_t* x, int64_t row, int64_t panel, Ahead ahead) {
    const int64_t size = a.inner * kPanel;
    const _Float16* weight = static_cast<const _Float16*>(a.weight) + panel * size;
    const auto rows_from = [=](int64_t k) VLLM_INLINE { return weight + k * kPanel; };
    multiply_panels<R, P, false>(a, x, a.inner, rows_from, size, a.scales + panel * kPanel, kPanel, row, panel, ahead);
  }

  static int64_t filled_up(int64_t inner) { return (inner + kRun - 1) / kRun * kRun; }

  // A row of x as [ceil(inner / kRun)][rows][kRun], as FloatProduct, then the inverse scales as floats [rows].
  static void pack_values(const BF16* x, int64_t inner, int64_t r, int64_t rows, uint32_t* out) {
    const int exponent = kRowExponent - largest_exponent(x, inner);
    const Vec scale = scale_by_power_of_two(set1(1.0f), set1(static_cast<float>(exponent)));
    const Vec inverse = scale_by_power_of_two(set1(1.0f), set1(static_cast<float>(-exponent)));
    store_n(reinterpret_cast<float*>(out) + filled_up(inner) * rows + r, inverse, 1);
    for (int64_t k = 0; k < inner; k += kRun) {
      const Vec values = load_n(x + k, static_cast<int>(least(kRun, inner - k))) * scale;
      const __m512i halves = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(values.v, _MM_FROUND_TO_NEAREST_INT));
      _mm512_storeu_si512(out + k * rows + r * kRun, _mm512_or_si512(halves, _mm512_slli_epi32(halves, 16)));
    }
  }

  // R packed rows of `inner` values times P panels, into args.out. rows_from(k), for multiples k of kHalfSum, are the first
  // panel's rows from k on, up to kHalfSum of them; the next panel's are `stride` values further. Columns c and c + 16
  // stand side by side in `kSideBySide` panels. `scales` are the first panel's, the next one's `scales_stride` further.
  template <int R, int P, bool kSideBySide, typename Rows>
  static void multiply_panels(const LinearArgs& a, const uint32_t* x, int64_t inner, const Rows& rows_from,
                              int64_t stride, const float* scales, int64_t scales_stride, int64_t row, int64_t panel,
                              Ahead ahead) {
    // In the first-level cache: registers hold the float16 sums.
    alignas(64) float totals[R][P][kPanel] = {};
    int64_t k = 0;
    for (; k + kHalfSum <= inner; k += kHalfSum) {
      if constexpr (kSideBySide) {
        add_chunk<R, P>(x + k * R, rows_from(k), stride, &ahead, totals);
      } else {
        Halves sums[R][P];
        add_runs<R, P>(x + k * R, rows_from(k), stride, ahead, sums);
        add_to_totals<R, P, kSideBySide>(sums, totals);
      }
    }
    if (k < inner) {
      const _Float16* rows = rows_from(k);
      for (const int64_t first = k; k < inner; k += kRun) {
        Halves sums[R][P];
        add_products<R, P>(x + k * R, rows + (k - first) * kPanel, stride, least(kRun, inner - k), ahead, sums);
        add_to_totals<R, P, kSideBySide>(sums, totals);
      }
    }
    write_totals<R, P>(a, totals, x + filled_up(inner) * R, scales, scales_stride, row, panel);
  }

  // Writes totals, scaled back: `inverses` are the rows' as floats.
  template <int R, int P>
  static void write_totals(const LinearArgs& a, const float (&totals)[R][P][kPanel], const uint32_t* inverses,
                           const float* scales, int64_t scales_stride, int64_t row, int64_t panel) {
    Vec sums[R][P][2];
    scale_totals(totals[0][0], R, P, inverses, scales, scales_stride, sums[0][0]);
    write_tile<BF16>(a, sums, row, panel, 0);
  }

  // to [rows][panels][2] = totals [rows][panels][32], times both scales.
  [[gnu::noinline]] static void scale_totals(const float* totals, int rows, int panels, const uint32_t* inverses,
                                             const float* scales, int64_t scales_stride, Vec* to) {
    for (int r = 0; r < rows; ++r) {
      const Vec scale = set1(reinterpret_cast<const float*>(inverses)[r]);
      for (int p = 0; p < panels; ++p, totals += kPanel, to += 2) {
        const float* columns = scales + p * scales_stride;
        to[0] = load(totals) * (scale * load(columns));
        to[1] = load(totals + 16) * (scale * load(columns + 16));
      }
    }
  }

  // sums = those that add(run) leaves there for each run of kHalfSum values of k, summed pairwise: neighbours, then pairs, and
  // so on. A loop, as copies of what it adds for each run would be most of what there is to compile.
  template <int R, int P, typename F>
  [[gnu::always_inline]] static inline void add_pairwise(Halves (&sums)[R][P], const F& add_run) {
    constexpr int kRuns = kHalfSum / kRun, kLevels = 2;
    static_assert(1 << kLevels == kRuns);
    Halves earlier[kLevels][R][P];
#pragma GCC unroll 1
    for (int run = 0; run < kRuns; ++run) {
      add_run(run);
      int level = 0;
#pragma GCC unroll 1
      for (; run >> level & 1; ++level) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
          for (int p = 0; p < P; ++p) sums[r][p] = add(earlier[level][r][p], sums[r][p]);
        }
      }
      if (level < kLevels) std::memcpy(earlier[level], sums, sizeof(sums));
    }
  }

  template <int R, int P, bool kSideBySide>
  static inline void add_to_totals(const Halves (&sums)[R][P], float (&totals)[R][P][kPanel]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const __m512i bits = bits_of(sums[r][p]);
        const __m256i first = kSideBySide ? _mm512_cvtepi32_epi16(bits) : _mm512_castsi512_si256(bits);
        const __m256i second =
            kSideBySide ? _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)) : _mm512_extracti64x4_epi64(bits, 1);
        const Vec low{_mm512_cvtph_ps(first)}, high{_mm512_cvtph_ps(second)};
        store(totals[r][p], load(totals[r][p]) + low);
        store(totals[r][p] + 16, load(totals[r][p] + 16) + high);
      }
    }
  }

 private:
  // Values [k, k + 32) of x without their signs, as integers in their order; zeros behind the last one.
  static __m512i magnitudes(const BF16* x, int64_t k, int64_t size) {
    const int64_t left = size - k;
    const __mmask32 lanes = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1u : 0u;
    return _mm512_and_si512(_mm512_maskz_loadu_epi16(lanes, x + k), _mm512_set1_epi16(0x7fff));
  }

  // The greatest of 32 integers without sign, in all places.
  static __m512i repeat_greatest(__m512i x) {
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    const __m128i eighth = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    // There is an instruction for the least of eight.
    const __m128i all = _mm_set1_epi16(-1);
    return _mm512_broadcastw_epi16(_mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(eighth, all)), all));
  }

  // The bits of the greatest magnitude in x.
  static int greatest_bits(const BF16* x, int64_t size) {
    __m512i greatest = _mm512_setzero_si512();
    for (int64_t k = 0; k < size; k += 32) greatest = _mm512_max_epu16(greatest, magnitudes(x, k, size));
    return _mm_cvtsi128_si32(_mm512_castsi512_si128(repeat_greatest(greatest))) & 0xffff;
  }

  // The exponent of the largest finite magnitude in x: 2^e <= |x| < 2^(e + 1); within what both scales can hold.
  static int largest_exponent(const BF16* x, int64_t size) {
    const int biased = greatest_bits(x, size) >> 7;
    // Any scale will do for infinities and NaN.
    if (biased == 255) return 0;
    const int exponent = biased - 127;
    return exponent < -120 ? -120 : exponent;
  }

  // kHalfSum values of k. A function of its own: inlined beside what widens codes, sums do not stay in registers.
  template <int R, int P>
  [[gnu::noinline]] static void add_chunk(const uint32_t* x, const _Float16* panel, int64_t panel_size, Ahead* ahead,
                                          float (&totals)[R][P][kPanel]) {
    Halves sums[R][P];
    add_runs<R, P>(x, panel, panel_size, *ahead, sums);
    add_to_totals<R, P, true>(sums, totals);
  }

  // sums = R rows of packed x times P panels over kHalfSum values of k.
  template <int R, int P>
  static inline void add_runs(const uint32_t* x, const _Float16* panel, int64_t panel_size, Ahead& ahead,
                              Halves (&sums)[R][P]) {
    add_pairwise(sums, [&](int run) VLLM_INLINE {
      add_products<R, P>(x + run * kRun * R, panel + run * kRun * kPanel, panel_size, kRun, ahead, sums);
    });
  }

  // The same over `run` values of k.
  template <int R, int P>
  static inline void add_products(const uint32_t* x, const _Float16* panel, int64_t panel_size, int64_t run, Ahead& ahead,
                                  Halves (&sums)[R][P]) {
    ahead();
    add_product<R, P, true>(x, panel, panel_size, sums);
#pragma GCC unroll 1
    for (int64_t k = 1; k < run; ++k) add_product<R, P, false>(x + k, panel + k * kPanel, panel_size, sums);
  }

  template <int R, int P, bool kFirst>
  static inline void add_product(const uint32_t* x, const _Float16* row, int64_t panel_size, Halves (&sums)[R][P]) {
    Halves weights[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(row + p * panel_size + kRowsAhead * kPanel);
      weights[p] = load_halves(row + p * panel_size);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Halves value = halves_of(_mm512_set1_epi32(static_cast<int>(x[r * kRun])));
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        sums[r][p] = kFirst ? mul(value, weights[p]) : fma(value, weights[p], sums[r][p]);
      }
    }
  }
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
