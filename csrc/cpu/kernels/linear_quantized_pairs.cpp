// As linear_quantized.cpp, for values that are bfloat16 to the bit, by its dot products: two of k at a time, at twice the rate
// of float32 multiply-adds where a CPU has fast ones. Products are exact, sums are float32's: those of a group's products with
// the codes' plain values are multiplied with the group's scale. For a few rows codes are widened in registers, for more a
// panel is widened once for all; the same numbers are summed in the same order: a row's results do not depend on the others.
#include "../isa.h"
#include "../pair_codes.h"
#include "../quantized_dots.h"

namespace vllm_cpu {
namespace VLLM_ISA {

#if defined(__AVX512BF16__)
namespace {

// Rows whose sums, with two vectors of values, a factor and what codes are widened by, are registers.
constexpr int kDirectRows = 12;
// Rows whose totals are registers, too, and not written for each group.
constexpr int kWidenedRows = 7;
constexpr int kSlots = 2;
// Units whose products are summed before they are scaled, also of long groups: short chains keep the rounding error small.
constexpr int64_t kChainUnits = 16;

// A prepared panel: scales [groups][32], offsets [groups][32], and widened codes.
template <bool kWidened>
struct Prepared {
  float *scales, *offsets;
  uint8_t* codes;
  Prepared(const LinearArgs& a, int64_t panel) {
    scales = a.prepared + panel % kSlots * size(a);
    offsets = scales + a.quant.groups * kPanel;
    codes = reinterpret_cast<uint8_t*>(offsets + a.quant.groups * kPanel);
  }
  static int64_t size(const LinearArgs& a) {
    return 2 * kPanel * a.quant.groups + (kWidened ? num_units(a.quant) * kUnitBytes / 4 : 0);
  }
};

// Codes that were widened, as PairCodes.
struct WidenedPairs {
  // So that a unit takes 32 * kBits bytes.
  static constexpr int kBits = 16;
  struct Unit {
    const uint8_t* codes;
    explicit Unit(const uint8_t* codes) : codes(codes) {}
  };
  explicit WidenedPairs(const LinearArgs&) {}
  template <int half, int pair>
  __m512i values(const Unit& unit) const {
    return _mm512_loadu_si512(unit.codes + 128 * pair + 64 * half);
  }
};

// kWidened: panels are widened once for all rows.
template <bool kWidened>
struct QuantizedPairProduct {
  using Row = BF16;
  // Two values of a row, or the sum of a group's.
  using Element = uint32_t;
  static constexpr int kMaxRows = kWidened ? kWidenedRows : kDirectRows;
  static constexpr int64_t kPanelsAtATime = kSlots;

  static constexpr int panels_at_once(int rows) { return !kWidened && rows <= 4 ? 2 : 1; }

  static int64_t panel_size(const LinearArgs& a) { return a.quant.at.size; }
  static int64_t packed_row(const LinearArgs& a) { return num_units(a.quant) * kPairs + a.quant.groups; }
  static int64_t prepared_size(const LinearArgs& a) { return kSlots * Prepared<kWidened>::size(a); }

  // [units][rows][4], then the sums of groups [groups][rows], if offsets are to be multiplied with them.
  static void pack_row(const LinearArgs& a, const BF16* x, int64_t r, int64_t rows, uint32_t* out) {
    const Quantized& q = a.quant;
    const bool in_words = pairs_in_words(q), sums_up = has_offsets(q);
    uint32_t *to = out + r * kPairs, *sums = out + num_units(q) * kPairs * rows + r;
    for (int64_t g = 0; g < q.groups; ++g, sums += rows) {
      const int64_t begin = g * q.group_size, end = least(begin + q.group_size, a.inner);
      SumOfRow sum;
      for (int64_t k = begin, u = units_of_group(q); u > 0; --u, k += kUnit, to += rows * kPairs) {
        const UnitOfRow unit(q, x, k, end, in_words);
        _mm_storeu_si128((__m128i*)to, unit.pairs);
        if (sums_up) sum.add(unit.values);
      }
      if (!sums_up) continue;
      const float total = sum.total();
      std::memcpy(sums, &total, sizeof(total));
    }
  }

  static void prepare(const LinearArgs& a, int64_t panel, int64_t stop) {
    for (; panel < stop; ++panel) {
      const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + panel * a.quant.at.size;
      const Prepared<kWidened> to(a, panel);
      widen_scales(a.quant, weight, to.scales, to.offsets);
      if constexpr (kWidened) {
        with_pair_codes<kWidenedRows>(a.quant, [&](auto* kind) {
          widen_pairs<std::remove_cvref_t<decltype(*kind)>>(a, weight, num_units(a.quant), to.codes);
        });
      }
    }
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const uint32_t* x, int64_t row, int64_t panel, Ahead ahead) {
    if constexpr (kWidened) {
      add_panels<WidenedPairs, R, P>(a, x, row, panel, Prepared<kWidened>(a, panel).codes, ahead);
    } else {
      with_pair_codes<R>(a.quant, [&](auto* kind) {
        const uint8_t* codes = static_cast<const uint8_t*>(a.weight) + panel * panel_size(a);
        add_panels<std::remove_cvref_t<decltype(*kind)>, R, P>(a, x, row, panel, codes, ahead);
      });
    }
  }

 private:
  // f(r, p, half) of each vector of a tile's sums.
  template <int R, int P, typename F>
  [[gnu::always_inline]] static inline void for_each(const F& f) {
    unroll<R * P * 2>([&](auto i) VLLM_INLINE { f(Constant<i / 2 / P>{}, Constant<i / 2 % P>{}, Constant<i % 2>{}); });
  }

  // `codes`: of the first panel; those of the next ones follow panel by panel.
  template <typename C, int R, int P>
  [[gnu::noinline]] static void add_panels(const LinearArgs& a, const uint32_t* x, int64_t row, int64_t panel,
                                           const uint8_t* codes, Ahead ahead) {
    const C kind(a);
    const Quantized& q = a.quant;
    const int64_t codes_stride = q.at.size;
    const float* scales[P];
    for (int p = 0; p < P; ++p) scales[p] = Prepared<kWidened>(a, panel + p).scales;
    NextPanels next(a, panel, P);
    Vec totals[R][P][2];
    if constexpr (kWidened) {
      for_each<R, P>([&](int r, int p, int half) VLLM_INLINE { totals[r][p][half] = zero(); });
    } else {
      // In memory: registers are for the sums.
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) totals[r][p][0] = totals[r][p][1] = zero();
      }
    }
    for (int64_t g = 0; g < q.groups; ++g) {
      for (int64_t left = units_of_group(q); left > 0; left -= kChainUnits) {
        Vec sums[R][P][2];
        unroll<R>([&](int r) VLLM_INLINE {
          unroll<P>([&](int p) VLLM_INLINE { sums[r][p][0] = sums[r][p][1] = zero(); });
        });
        const int64_t chain = least(left, kChainUnits);
        if constexpr (kWidened) ahead(static_cast<int>(chain + 1) / 2);
        for (int64_t u = chain; u > 0; --u, x += R * kPairs, codes += kPanel * C::kBits) {
          if constexpr (!kWidened) next.template fetch<C::kBits, P>();
          unroll<P>([&](int p) VLLM_INLINE {
            const typename C::Unit unit(codes + p * codes_stride);
            unroll<kPairs>([&](auto pair) VLLM_INLINE {
              const __m512bh low = (__m512bh)kind.template values<0, pair>(unit);
              const __m512bh high = (__m512bh)kind.template values<1, pair>(unit);
              unroll<R>([&](int r) VLLM_INLINE {
                const __m512bh two = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r * kPairs + pair]));
                sums[r][p][0].v = _mm512_dpbf16_ps(sums[r][p][0].v, low, two);
                sums[r][p][1].v = _mm512_dpbf16_ps(sums[r][p][1].v, high, two);
              });
            });
          });
        }
        unroll<P>([&](int p) VLLM_INLINE {
          const Vec low = load(scales[p] + g * kPanel), high = load(scales[p] + g * kPanel + 16);
          unroll<R>([&](int r) VLLM_INLINE {
            totals[r][p][0] = fma(sums[r][p][0], low, totals[r][p][0]);
            totals[r][p][1] = fma(sums[r][p][1], high, totals[r][p][1]);
          });
        });
      }
    }
    // x is at the sums of groups.
    if constexpr (kWidened) {
      if (has_offsets(q)) add_offsets<R, P>(q, x, scales, totals);
      // Totals that were passed on themselves would be in memory all along.
      Vec copies[R][P][2];
      for_each<R, P>([&](int r, int p, int half) VLLM_INLINE { copies[r][p][half] = totals[r][p][half]; });
      write_tile<BF16>(a, copies, row, panel, 0);
    } else {
      if (has_offsets(q)) add_offsets_to_memory<R, P>(q, x, scales, totals);
      write_tile<BF16>(a, totals, row, panel, 0);
    }
  }

  // totals += the sums of groups [groups][R] times their offsets, which stand behind the scales.
  template <int R, int P>
  [[gnu::always_inline]] static inline void add_offsets(const Quantized& q, const uint32_t* sums,
                                                        const float* const (&scales)[P], Vec (&totals)[R][P][2]) {
    for (int64_t at = q.groups * kPanel; at < 2 * q.groups * kPanel; at += kPanel, sums += R) {
      unroll<P>([&](int p) VLLM_INLINE {
        const Vec low = load(scales[p] + at), high = load(scales[p] + at + 16);
        unroll<R>([&](int r) VLLM_INLINE {
          float sum;
          std::memcpy(&sum, sums + r, sizeof(sum));
          totals[r][p][0] = fma(set1(sum), low, totals[r][p][0]);
          totals[r][p][1] = fma(set1(sum), high, totals[r][p][1]);
        });
      });
    }
  }

  template <int R, int P>
  [[gnu::noinline]] static void add_offsets_to_memory(const Quantized& q, const uint32_t* sums,
                                                      const float* const (&scales)[P], Vec (&totals)[R][P][2]) {
    Vec own[R][P][2];
    for_each<R, P>([&](int r, int p, int half) VLLM_INLINE { own[r][p][half] = totals[r][p][half]; });
    add_offsets<R, P>(q, sums, scales, own);
    for_each<R, P>([&](int r, int p, int half) VLLM_INLINE { totals[r][p][half] = own[r][p][half]; });
  }
};

}  // namespace

bool linear_quantized_pairs(LinearArgs a) {
  if (a.dtype != DType::bf16 || !has_fast_bf16_dot() || !has_bfloat16_values(a.quant)) return false;
  a.quant.zero_in_codes = a.quant.bits <= 6;
  // For so few tiles widening anew takes less time than writing a panel's values and reading them again.
  if (a.rows <= 2 * kDirectRows) {
    Gemm<QuantizedPairProduct<false>>::run(a);
  } else {
    Gemm<QuantizedPairProduct<true>>::run(a);
  }
  return true;
}
#else
bool linear_quantized_pairs(LinearArgs) { return false; }
#endif

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
