// linear_quantized of bfloat16 in float16 arithmetic, with the sums of HalfProduct: as unquantised weights are multiplied at
// this level. Other levels, kinds of weights that float16 would not pay for, and rows that would be lost in sums of float16
// take linear_quantized.
//
// Each column is scaled by a power of two into float16's range; a weight is one fused multiply-add of its code's value with
// the group's scale and offset, all in float16. For a few rows weights are widened in registers, for more into the first-level
// cache, kHalfSum k at a time, and for many a panel is widened once for all of them; in every way the same numbers are summed
// in the same order: a row's results do not depend on the other rows of the batch.
#include "../half_codes.h"
#include "../half_product.h"

namespace vllm_cpu {
namespace VLLM_ISA {

#if defined(VLLM_HAS_HALF_LANES)
namespace {

// How far ahead to fetch codes: what the hardware fetches by itself stops at each page.
constexpr int64_t kCodesAhead = 2048;
constexpr int64_t kChunkUnits = HalfProduct::kHalfSum / kUnit;

// Whether the weight is of one of HalfCodes' kinds, and nothing is added to it.
bool fits(const Quantized& q) { return q.values != Values::tables && q.sparse_starts == nullptr; }

// A packed row consists of groups filled up to whole units.
int64_t packed_inner(const LinearArgs& a) { return num_units(a.quant) * kUnit; }

struct QuantizedHalfProduct {
  using Row = BF16;
  using Element = uint32_t;
  static constexpr int kMaxRows = HalfProduct::kMaxRows;
  static constexpr int64_t kPanelsAtATime = 4;

  static constexpr int panels_at_once(int rows) { return rows <= 6 ? 4 : 2; }

  static int64_t panel_size(const LinearArgs& a) { return a.quant.at.size; }
  static int64_t packed_row(const LinearArgs& a) { return HalfProduct::filled_up(packed_inner(a)) + kRun; }

  static void pack_row(const LinearArgs& a, const BF16* x, int64_t r, int64_t rows, uint32_t* out) {
    const Placed placed(a, x);
    HalfProduct::pack_values(placed.values, packed_inner(a), r, rows, out);
  }

  static void leave_row(const LinearArgs& a, const BF16* x, int64_t row) {
    const Placed placed(a, x);
    if (HalfProduct::loses(placed.values, packed_inner(a))) mark_left(a, x, row);
  }

  static int64_t prepared_size(const LinearArgs& a) { return kPanelsAtATime * Prepared::size(a) + kHeader; }

  static void prepare(const LinearArgs& a, int64_t panel, int64_t stop) {
    std::memcpy(a.prepared, &panel, sizeof(panel));
    with_half_codes(a.quant, [&](auto* null) {
      const std::remove_cvref_t<decltype(*null)> kind(a.quant);
      for (; panel < stop; ++panel) {
        const Prepared to(a, panel);
        scale_columns(a, panel, kind.greatest, kind.factor, to);
        if (is_widened_once(a)) widen<std::remove_cvref_t<decltype(kind)>>(&kind, a, panel, to, 0, num_units(a.quant), to.values);
      }
    });
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const uint32_t* x, int64_t row, int64_t panel, Ahead ahead) {
    const int64_t inner = packed_inner(a);
    if constexpr (R <= kDirectRows) {
      if (is_direct(a)) return multiply_directly<R, P>(a, x, row, panel);
    }
    if (is_widened_once(a)) {
      const Prepared first(a, panel);
      const auto rows_from = [&](int64_t k) VLLM_INLINE { return first.values + k * kPanel; };
      HalfProduct::multiply_panels<R, P, true>(a, x, inner, rows_from, Prepared::size(a) * 2, first.scales,
                                               Prepared::size(a), row, panel, ahead);
      return;
    }
    with_half_codes(a.quant, [&](auto* null) {
      using Kind = std::remove_cvref_t<decltype(*null)>;
      const Kind kind(a.quant);
      multiply_widened<R, P>(a, x, row, panel, ahead, &widen<Kind>, &kind);
    });
  }

 private:
  // A row's values where its weight has their codes, zeros where groups are filled up.
  struct Placed {
    const Scratch<BF16> memory;
    const BF16* values;
    Placed(const LinearArgs& a, const BF16* x) : memory(is_in_place(a) ? 0 : packed_inner(a)), values(x) {
      if (is_in_place(a)) return;
      const Quantized& q = a.quant;
      std::memset(memory.get(), 0, static_cast<size_t>(packed_inner(a)) * sizeof(BF16));
      for (int64_t g = 0; g < q.groups; ++g) {
        BF16* to = memory.get() + g * units_of_group(q) * kUnit;
        const int64_t begin = g * q.group_size, end = least(begin + q.group_size, a.inner);
        for (int64_t k = begin; k < end; ++k) *to++ = x[q.order == nullptr ? k : q.order[k]];
      }
      values = memory.get();
    }
    static bool is_in_place(const LinearArgs& a) { return a.quant.order == nullptr && packed_inner(a) == a.inner; }
  };

  // The first of the panels that are prepared.
  static constexpr int64_t kHeader = 16;

  // Rows for which weights are widened in registers.
  static constexpr int kDirectRows = 4;

  static bool is_direct(const LinearArgs& a) { return a.rows <= kDirectRows; }
  static bool is_widened_once(const LinearArgs& a) { return a.rows > kMaxRows; }

  // A prepared panel: factors of its columns' sums [32], scales and offsets of groups as floats
  // [groups][2][32] and as float16 [groups][32], columns c and c + 16 side by side, and widened codes [k][32] likewise.
  struct Prepared {
    float *scales, *wide;
    _Float16 *group_scales, *group_offsets, *values;
    Prepared(const LinearArgs& a, int64_t panel) {
      int64_t first;
      std::memcpy(&first, a.prepared, sizeof(first));
      scales = a.prepared + kHeader + (panel - first) * size(a);
      wide = scales + kPanel;
      group_scales = reinterpret_cast<_Float16*>(wide + 2 * kPanel * a.quant.groups);
      group_offsets = group_scales + a.quant.groups * kPanel;
      values = group_offsets + a.quant.groups * kPanel;
    }
    static int64_t size(const LinearArgs& a) {
      return kPanel + 3 * kPanel * a.quant.groups + (is_widened_once(a) ? packed_inner(a) * kPanel / 2 : 0);
    }
  };

  // Widens units [unit, stop) of a panel with codes of a kind, as [k][32], columns c and c + 16 side by side.
  using Widen = void(const void* kind, const LinearArgs& a, int64_t panel, const Prepared& prepared, int64_t unit,
                     int64_t stop, _Float16* to);

  // Reorder the float16 numbers of 32 columns: those of columns c and c + 16 side by side.
  static __m512i side_by_side(__m512i columns) {
    alignas(64) static constexpr int16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), columns);
  }

  // Vectors of columns c and c + 16, as float16 side by side.
  static __m512i pair(Vec low, Vec high) {
    const __m512i first = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(low.v, _MM_FROUND_TO_NEAREST_INT));
    const __m512i second = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(high.v, _MM_FROUND_TO_NEAREST_INT));
    return _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
  }

  // Whether scales and offsets are float16 as they are stored.
  static bool has_half_scales(const Quantized& q) {
    return q.scales == Stored::f16 && (q.offsets == Stored::f16 || q.offsets == Stored::none) && q.supers == 0 &&
           q.zeros == Stored::none && !lacks_zero(q) && q.values != Values::e4m3;
  }

  // The bound of a column's weights is multiplied with this, so that their roundings stay below it.
  static constexpr float kMargin = 1.0f + 0x1p-9f;

  // `greatest`, `factor`: of HalfCodes.
  static void scale_columns(const LinearArgs& a, int64_t panel, float greatest, float factor, const Prepared& to) {
    const Quantized& q = a.quant;
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + panel * q.at.size;
    const int shift = __builtin_ilogbf(factor);
    const bool offsets = has_offsets(q);
    if (has_half_scales(q)) {
      const _Float16* stored = reinterpret_cast<const _Float16*>(weight + q.at.scales);
      const _Float16* added = reinterpret_cast<const _Float16*>(weight + q.at.offsets);
      __m512i scale = _mm512_setzero_si512(), offset = _mm512_setzero_si512();
      for (int64_t i = 0; i < q.groups * kPanel; i += kPanel) {
        scale = greater_half(scale, stored + i);
        if (offsets) offset = greater_half(offset, added + i);
      }
      const Vec bounds[2] = {
          fma(half_of<0>(scale), set1(greatest * factor), half_of<0>(offset)) * set1(kMargin),
          fma(half_of<1>(scale), set1(greatest * factor), half_of<1>(offset)) * set1(kMargin),
      };
      Vec exponents[2];
      set_exponents(bounds, to, exponents);
      const Halves offset_shifts = halves_of(pair(exponents[0], exponents[1]));
      const Halves scale_shifts = add(offset_shifts, repeat_half(static_cast<_Float16>(shift)));
      for (int64_t i = 0; i < q.groups * kPanel; i += kPanel) {
        const Halves some = halves_of(side_by_side(_mm512_loadu_si512(stored + i)));
        store_halves(to.group_scales + i, scale_by_powers(some, scale_shifts));
        Halves others = halves_of(_mm512_setzero_si512());
        if (offsets) others = scale_by_powers(halves_of(side_by_side(_mm512_loadu_si512(added + i))), offset_shifts);
        store_halves(to.group_offsets + i, others);
      }
      return;
    }
    float *scales = to.wide, *added = to.wide + q.groups * kPanel;
    widen_scales(q, weight, scales, added);
    Vec bounds[2];
    for (int half = 0; half < 2; ++half) {
      Vec scale = zero(), offset = zero();
      for (int64_t i = 16 * half; i < q.groups * kPanel; i += kPanel) {
        scale = max(scale, magnitude(load(scales + i)));
        if (offsets) offset = max(offset, magnitude(load(added + i)));
      }
      bounds[half] = fma(scale, set1(greatest * factor), offset) * set1(kMargin);
    }
    Vec exponents[2], inverses[2];
    set_exponents(bounds, to, exponents);
    for (int half = 0; half < 2; ++half) inverses[half] = scale_by_power_of_two(set1(1.0f), exponents[half]);
    for (int64_t i = 0; i < q.groups * kPanel; i += kPanel) {
      const Vec low = load(scales + i) * set1(factor), high = load(scales + i + 16) * set1(factor);
      _mm512_storeu_si512(to.group_scales + i, pair(low * inverses[0], high * inverses[1]));
      __m512i others = _mm512_setzero_si512();
      if (offsets) others = pair(load(added + i) * inverses[0], load(added + i + 16) * inverses[1]);
      _mm512_storeu_si512(to.group_offsets + i, others);
    }
  }

  // The greater magnitudes, as float16.
  static __m512i greater_half(__m512i most, const _Float16* some) {
    const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(some), _mm512_set1_epi16(0x7fff));
    return _mm512_max_epu16(most, bits);
  }

  template <int half>
  static Vec half_of(__m512i columns) {
    return {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(columns, half))};
  }

  // Powers of two that bring columns whose weights do not exceed `bounds` into float16's range.
  static void set_exponents(const Vec (&bounds)[2], const Prepared& to, Vec (&exponents)[2]) {
    for (int half = 0; half < 2; ++half) {
      exponents[half] = set1(float{HalfProduct::kRowExponent}) - exponents_of(bounds[half]);
      store(to.scales + 16 * half, scale_by_power_of_two(set1(1.0f), zero() - exponents[half]));
    }
  }

  static Vec magnitude(Vec x) { return max(x, zero() - x); }

  // e with 2^e <= x < 2^(e + 1), within what can be scaled by; 0 for zero.
  static Vec exponents_of(Vec x) {
    const Vec least_one = set1(-120.0f), greatest_one = set1(120.0f);
    return select(gt(x, zero()), max(min(Vec{_mm512_getexp_ps(x.v)}, greatest_one), least_one), zero());
  }

  // Where a product is: codes and scales of the first of its panels, and units until their next group.
  struct Place {
    const uint8_t* codes;
    const _Float16 *scales, *offsets;
    int64_t left, units, codes_stride, scales_stride;
    NextPanels next;
  };

  // `widen`: of the weight's kind of codes, which is no type here: what takes most of the time to compile is the same for all.
  template <int R, int P>
  static void multiply_widened(const LinearArgs& a, const uint32_t* x, int64_t row, int64_t panel, Ahead ahead, Widen* widen,
                               const void* kind) {
    const int64_t inner = packed_inner(a);
    // While these panels are widened, the next ones come from memory, a part with each chunk.
    const char* next = static_cast<const char*>(a.weight) + (panel + P) * panel_size(a);
    const int64_t chunks = (inner + HalfProduct::kHalfSum - 1) / HalfProduct::kHalfSum;
    const int64_t share = (P * panel_size(a) / 64 + chunks - 1) / chunks;
    alignas(64) _Float16 widened[P][HalfProduct::kHalfSum][kPanel];
    const auto rows_from = [&](int64_t k) VLLM_INLINE {
      const int64_t unit = k / kUnit, stop = least(unit + kChunkUnits, num_units(a.quant));
      for (int64_t i = 0; i < share; ++i, next += 64) __builtin_prefetch(next, 0, 2);
      for (int p = 0; p < P; ++p) widen(kind, a, panel + p, Prepared(a, panel + p), unit, stop, widened[p][0]);
      return static_cast<const _Float16*>(widened[0][0]);
    };
    HalfProduct::multiply_panels<R, P, true>(a, x, inner, rows_from, HalfProduct::kHalfSum * kPanel,
                                             Prepared(a, panel).scales, Prepared::size(a), row, panel, ahead);
  }

  template <int R, int P>
  static void multiply_directly(const LinearArgs& a, const uint32_t* x, int64_t row, int64_t panel) {
    with_half_codes(a.quant, [&](auto* null) {
      using Kind = std::remove_cvref_t<decltype(*null)>;
      const Kind kind(a.quant);
      constexpr int kTogether = R == 1 && P > 1 ? 2 : 1;
      for (int p = 0; p < P; p += kTogether) add_panels<Kind, R, kTogether>(kind, a, x, row, panel + p);
    });
  }

  template <typename C, int R, int P>
  [[gnu::noinline]] static void add_panels(const C& all, const LinearArgs& a, const uint32_t* x, int64_t row,
                                           int64_t panel) {
    const C kind = all;
    const int64_t inner = packed_inner(a), units = units_of_group(a.quant), size = panel_size(a);
    const Prepared first(a, panel);
    Place at{static_cast<const uint8_t*>(a.weight) + panel * size, first.group_scales, first.group_offsets, units, units,
             size, 2 * Prepared::size(a), NextPanels(a, panel, P)};
    alignas(64) float totals[R][P][kPanel] = {};
    int64_t k = 0;
    for (; k + HalfProduct::kHalfSum <= inner; k += HalfProduct::kHalfSum) {
      Halves sums[R][P];
      HalfProduct::add_pairwise(sums, [&](int run) VLLM_INLINE {
        const uint32_t* values = x + (k + run * kRun) * R;
        add_unit<C, R, P, true>(kind, values, at, sums);
        add_unit<C, R, P, false>(kind, values + kUnit, at, sums);
      });
      HalfProduct::add_to_totals<R, P, true>(sums, totals);
    }
    for (; k < inner; k += kRun) {
      Halves sums[R][P];
      add_unit<C, R, P, true>(kind, x + k * R, at, sums);
      if (k + kUnit < inner) add_unit<C, R, P, false>(kind, x + k * R + kUnit, at, sums);
      HalfProduct::add_to_totals<R, P, true>(sums, totals);
    }
    HalfProduct::write_totals<R, P>(a, totals, x + HalfProduct::filled_up(inner) * R, first.scales, Prepared::size(a),
                                    row, panel);
  }

  // A unit's products, of each row's run.
  template <typename C, int R, int P, bool kFirst>
  [[gnu::always_inline]] static inline void add_unit(const C& kind, const uint32_t* x, Place& at, Halves (&sums)[R][P]) {
    at.next.template fetch<C::kBits, P>();
    unroll<P>([&](int p) VLLM_INLINE {
      const typename C::Unit eight(at.codes + p * at.codes_stride);
      const Halves scale = load_halves(at.scales + p * at.scales_stride);
      const Halves offset = load_halves(at.offsets + p * at.scales_stride);
      unroll<kUnit>([&](auto k) VLLM_INLINE {
        const Halves weights = fma(kind.template values<k>(eight), scale, offset);
        unroll<R>([&](int r) VLLM_INLINE {
          const Halves value = halves_of(_mm512_set1_epi32(static_cast<int>(x[r * kRun + k])));
          sums[r][p] = kFirst && k == 0 ? mul(value, weights) : fma(value, weights, sums[r][p]);
        });
      });
    });
    at.codes += kPanel * C::kBits;
    if (--at.left == 0) {
      at.left = at.units;
      at.scales += kPanel;
      at.offsets += kPanel;
    }
  }

  template <typename C>
  [[gnu::noinline]] static void widen(const void* all, const LinearArgs& a, int64_t panel, const Prepared& prepared,
                                      int64_t unit, int64_t stop, _Float16* to) {
    const Quantized& q = a.quant;
    const C kind = *static_cast<const C*>(all);
    const uint8_t* codes = static_cast<const uint8_t*>(a.weight) + panel * q.at.size + unit * kPanel * C::kBits;
    const int64_t units = units_of_group(q);
    int64_t group = unit / units, left = units - unit % units;
    while (unit < stop) {
      const Halves scale = load_halves(prepared.group_scales + group * kPanel);
      const Halves offset = load_halves(prepared.group_offsets + group * kPanel);
      const int64_t end = least(unit + left, stop);
      for (; unit < end; ++unit, codes += kPanel * C::kBits, to += kUnit * kPanel) {
        for (int i = 0; i < kPanel * C::kBits; i += 64) __builtin_prefetch(codes + kCodesAhead + i);
        const typename C::Unit eight(codes);
        unroll<kUnit>([&](auto k) VLLM_INLINE {
          store_halves(to + k * kPanel, fma(kind.template values<k>(eight), scale, offset));
        });
      }
      ++group;
      left = units;
    }
  }
};

}  // namespace

void linear_quantized_half(const LinearArgs& a) {
  if (fits(a.quant)) {
    multiply_or_leave<QuantizedHalfProduct>(a, &avx512_bf16::linear_quantized);
  } else {
    linear_quantized(a);
  }
}
#else
void linear_quantized_half(const LinearArgs& a) { linear_quantized(a); }
#endif

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
