// x W^T + bias with a weight packed once, in float32, in short float16 runs summed in float32 (see HalfProduct), or in
// dot products of two (see PairProduct).
//
// A packed weight is a row of panels, each 32 output columns wide: panel [K][32]. In bfloat16 columns c and c + 16
// stand side by side, so that one 64-byte load and two bit operations give both as float32; on Intel's CPUs without
// matrix tiles that beats the bfloat16 dot-product instructions, whose rate is half that of float32 multiply-adds.
//
// Each output is a sum of chains of multiply-adds over k, in order, whichever tile or thread computes it: a row's
// results do not depend on the other rows of the batch. Short chains keep the rounding error small.
#include "../pair_product.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Rows of a panel to fetch ahead: what the hardware fetches by itself stops at each page, and weights come from memory.
constexpr int kAhead = 48;

template <typename T>
inline void prefetch_row(const T* row) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (unsigned i = 0; i < kPanel * sizeof(T); i += 64) __builtin_prefetch(bytes + i);
}

inline int64_t padded_inner(const LinearArgs& a) { return num_runs(a) * kRun; }

// Products in float32 of x [rows, K] in T with a weight in W.
template <typename T, typename W>
struct FloatProduct : ChainedProduct<FloatProduct<T, W>, T, W, float, 1> {
  using Element = float;
  // Rows of a tile times the panel's two vectors, plus operands, fill the register file.
  static constexpr int kMaxRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;
  static constexpr int64_t kPanelsAtATime = 4;

  static int64_t packed_row(const LinearArgs& a) { return padded_inner(a); }

  // As floats [ceil(K / kRun)][rows][kRun]: whole vectors to write here, and neighbours to read for the product.
  static void pack_row(const LinearArgs& a, const T* x, int64_t r, int64_t rows, float* out) {
    for (int64_t k = 0; k < a.inner; k += kRun) {
      float* run = out + k * rows + r * kRun;
      for (int i = 0; i < kRun && k + i < a.inner; i += kLanes) {
        store(run + i, load_n(x + k + i, static_cast<int>(least(kLanes, a.inner - k - i))));
      }
    }
  }

  template <int R, int P>
  static inline void multiply_chain(const float* x, const W* panel, int64_t panel_size, int64_t inner, int group,
                                    Ahead& ahead, Vec (&sums)[R][P][2]) {
    for (; inner > 0; inner -= kRun, x += R * kRun) {
      const int run = static_cast<int>(least(kRun, inner));
      ahead();
      for (int k = 0; k < run; ++k, panel += kPanel) {
        Vec low[P], high[P];
        unroll<P>([&](auto p) VLLM_INLINE {
          if (kGroups == 1 || group == 0) prefetch_row(panel + p * panel_size + kAhead * kPanel);
          load_pair(panel + p * panel_size, group, &low[p], &high[p]);
        });
        unroll<R>([&](auto r) VLLM_INLINE {
          const Vec value = set1(x[r * kRun + k]);
          unroll<P>([&](auto p) VLLM_INLINE {
            sums[r][p][0] = fma(value, low[p], sums[r][p][0]);
            sums[r][p][1] = fma(value, high[p], sums[r][p][1]);
          });
        });
      }
    }
  }
};

#if defined(__AVX512FP16__)
// Products of bfloat16 in float16 arithmetic, which runs at twice the rate of float32. Rows of x and columns of W are
// scaled by powers of two into float16's range, where bfloat16's 8 bits are exact over 18 binades and more. Chains of
// kRun multiply-adds are summed pairwise, in float16 up to kHalfSum values of k and in float32 beyond: 40 % of the error
// that rounding the result to bfloat16 makes anyway. Nothing can overflow: 2^5 * 2^5 * 64 = 2^16, and each factor is
// below its power.
struct HalfProduct {
  using Row = BF16;
  // A value twice: broadcasting 32 bits is free, 16 bits are not.
  using Element = uint32_t;
  static constexpr int kMaxRows = 13;
  static constexpr int64_t kPanelsAtATime = 8;
  static constexpr int kHalfSum = 64;
  static constexpr int kRowExponent = 4;

  static constexpr int panels_at_once(int rows) { return rows <= 2 ? 8 : rows <= 6 ? 4 : 2; }

  static int64_t panel_size(const LinearArgs& a) { return a.inner * kPanel * sizeof(_Float16); }

  // The last kRun hold the inverse of the row's scale (see pack_row).
  static int64_t packed_row(const LinearArgs& a) { return padded_inner(a) + kRun; }

  // [ceil(K / kRun)][rows][kRun] as FloatProduct, then the inverse scales as floats [rows].
  static void pack_row(const LinearArgs& a, const BF16* x, int64_t r, int64_t rows, uint32_t* out) {
    const int exponent = kRowExponent - largest_exponent(x, a.inner);
    const Vec scale = scale_by_power_of_two(set1(1.0f), set1(static_cast<float>(exponent)));
    const Vec inverse = scale_by_power_of_two(set1(1.0f), set1(static_cast<float>(-exponent)));
    store_n(reinterpret_cast<float*>(out) + padded_inner(a) * rows + r, inverse, 1);
    for (int64_t k = 0; k < a.inner; k += kRun) {
      const Vec values = load_n(x + k, static_cast<int>(least(kRun, a.inner - k))) * scale;
      const __m512i halves = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(values.v, _MM_FROUND_TO_NEAREST_INT));
      _mm512_storeu_si512(out + k * rows + r * kRun, _mm512_or_si512(halves, _mm512_slli_epi32(halves, 16)));
    }
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const uint32_t* x, int64_t row, int64_t panel, Ahead ahead) {
    const int64_t panel_size = a.inner * kPanel;
    const _Float16* weight = static_cast<const _Float16*>(a.weight) + panel * panel_size;
    // In the first-level cache: registers hold the float16 sums.
    alignas(64) float totals[R][P][kPanel] = {};
    int64_t k = 0;
    for (; k + kHalfSum <= a.inner; k += kHalfSum) {
      __m512h sums[R][P];
      add_products<R, P, kHalfSum>(x + k * R, weight + k * kPanel, panel_size, kRun, ahead, sums);
      add_to_totals<R, P>(sums, totals);
    }
    for (; k < a.inner; k += kRun) {
      __m512h sums[R][P];
      add_products<R, P, kRun>(x + k * R, weight + k * kPanel, panel_size, least(kRun, a.inner - k), ahead, sums);
      add_to_totals<R, P>(sums, totals);
    }
    const float* inverse = reinterpret_cast<const float*>(x) + padded_inner(a) * R;
    for (int r = 0; r < R; ++r) {
      for (int p = 0; p < P; ++p) {
        const float* scales = a.scales + (panel + p) * kPanel;
        const Vec scale = set1(inverse[r]);
        write_sums<BF16>(a, load(totals[r][p]) * (scale * load(scales)),
                         load(totals[r][p] + 16) * (scale * load(scales + 16)), row + r, panel + p, 0);
      }
    }
  }

 private:
  // Of the largest finite magnitude in x: 2^e <= |x| < 2^(e + 1); within what both scales can hold.
  static int largest_exponent(const BF16* x, int64_t size) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t k = 0; k < size; k += 32) {
      const int64_t left = size - k;
      const __mmask32 lanes = left >= 32 ? ~0u : (1u << left) - 1u;
      const __m512i bits = _mm512_maskz_loadu_epi16(lanes, x + k);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
    }
    const __m512i even = _mm512_and_si512(largest, _mm512_set1_epi32(0xffff));
    const __m512i words = _mm512_max_epu32(_mm512_srli_epi32(largest, 16), even);
    const int biased = static_cast<int>(_mm512_reduce_max_epu32(words) >> 7);
    // Of infinities and NaN any scale will do.
    if (biased == 255) return 0;
    const int exponent = biased - 127;
    return exponent < -120 ? -120 : exponent;
  }

  // sums = R rows of packed x times P panels over N values of k, or over the first `run` of them if N is kRun.
  template <int R, int P, int N>
  static inline void add_products(const uint32_t* x, const _Float16* panel, int64_t panel_size, int64_t run,
                                  Ahead& ahead, __m512h (&sums)[R][P]) {
    if constexpr (N == kRun) {
      ahead();
      add_product<R, P, true>(x, panel, panel_size, sums);
#pragma GCC unroll 1
      for (int64_t k = 1; k < run; ++k) add_product<R, P, false>(x + k, panel + k * kPanel, panel_size, sums);
    } else {
      __m512h before[R][P];
      add_products<R, P, N / 2>(x, panel, panel_size, run, ahead, before);
      add_products<R, P, N / 2>(x + N / 2 * R, panel + N / 2 * kPanel, panel_size, run, ahead, sums);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) sums[r][p] = _mm512_add_ph(before[r][p], sums[r][p]);
      }
    }
  }

  template <int R, int P, bool kFirst>
  static inline void add_product(const uint32_t* x, const _Float16* row, int64_t panel_size, __m512h (&sums)[R][P]) {
    __m512h weights[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(row + p * panel_size + kAhead * kPanel);
      weights[p] = _mm512_loadu_ph(row + p * panel_size);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512h value = _mm512_castsi512_ph(_mm512_set1_epi32(static_cast<int>(x[r * kRun])));
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        sums[r][p] = kFirst ? _mm512_mul_ph(value, weights[p]) : _mm512_fmadd_ph(value, weights[p], sums[r][p]);
      }
    }
  }

  template <int R, int P>
  static inline void add_to_totals(const __m512h (&sums)[R][P], float (&totals)[R][P][kPanel]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const __m512i bits = _mm512_castph_si512(sums[r][p]);
        const Vec low{_mm512_cvtph_ps(_mm512_castsi512_si256(bits))};
        const Vec high{_mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
        store(totals[r][p], load(totals[r][p]) + low);
        store(totals[r][p] + 16, load(totals[r][p] + 16) + high);
      }
    }
  }
};
#endif

inline int64_t place(int64_t column, const float*) { return column; }
inline int64_t place(int64_t column, const F16*) { return column; }
inline int64_t place(int64_t column, const BF16*) { return column < 16 ? 2 * column : 2 * (column - 16) + 1; }

// Where a panel has the value of a column at k.
template <typename T>
inline int64_t place_in_panel(int64_t column, int64_t k, bool pairs, const T* panel) {
  return pairs ? k / 2 * 2 * kPanel + 2 * column + k % 2 : k * kPanel + place(column, panel);
}

template <typename T>
void pack_all(const PackLinearArgs& a) {
  const int64_t panels = (a.columns + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; ++panel) {
    T* out = static_cast<T*>(a.packed) + panel * a.inner * kPanel;
    for (int64_t column = 0; column < kPanel; ++column) {
      const int64_t source = panel * kPanel + column;
      const T* weight = static_cast<const T*>(a.weight) + source * a.weight_stride;
      for (int64_t k = 0; k < a.inner; ++k) {
        out[place_in_panel(column, k, a.pairs, out)] = source < a.columns ? weight[k] : T{};
      }
    }
  }
}

// A row of the weight is a column of a panel, a cache line apart from element to element: many rows take many cores.
template <typename T>
void take_rows(const PanelRowsArgs& a) {
#pragma omp parallel for schedule(static) if (a.count > 16)
  for (int64_t i = 0; i < a.count; ++i) {
    const int64_t row = a.rows ? a.rows[i] : a.narrow_rows[i];
    T* out = static_cast<T*>(a.out) + i * a.inner;
    const T* panel = static_cast<const T*>(a.packed) + row / kPanel * a.inner * kPanel;
    for (int64_t k = 0; k < a.inner; ++k) out[k] = panel[place_in_panel(row % kPanel, k, a.pairs, out)];
  }
}

}  // namespace

void pack_linear(const PackLinearArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, pack_all<scalar_t>(a)); }

void panel_rows(const PanelRowsArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, take_rows<scalar_t>(a)); }

void linear(const LinearArgs& a) {
  if (a.pairs) {
    Gemm<PairProduct>::run(a);
  } else if (a.scales == nullptr) {
    VLLM_DISPATCH_DTYPE(a.dtype, Gemm<FloatProduct<scalar_t, scalar_t>>::run(a));
  } else {
#if defined(__AVX512FP16__)
    Gemm<HalfProduct>::run(a);
#else
    Gemm<FloatProduct<BF16, F16>>::run(a);
#endif
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
