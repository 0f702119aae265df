// As linear_quantized.cpp, for codes that are integers, by dot products of bytes. Each block of up to 32 values of x, within a
// group of the weight, becomes integers in [-127, 127] with a scale of its own: rounded to one such digit
// (linear_quantized_int8), or as three digits, 128 to one (linear_quantized_digits), which keep 21 bits of the block's greatest
// value: float32's sums err by as much. Sums of a block's products are exact; blocks are added up in float32, in order, so that
// a row's results do not depend on the other rows of the batch.
#include "../byte_codes.h"
#include "../quantized_dots.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int kDirectRows = kLanes == 16 ? 4 : 2;
constexpr int kSlots = 2;

// Digits that a row is multiplied as.
constexpr int kAllDigits = 3;

bool is_widened(const LinearArgs& a) { return a.rows > kDirectRows; }

// sums += products of four bytes a lane, unsigned ones below 64 (any with VNNI) with signed ones.
#if defined(__AVX512VNNI__)
constexpr bool kSaturates = false;
inline Words add_dots(Words sums, Words codes, int32_t four) {
  return (Words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
}
#elif defined(__AVX512F__)
constexpr bool kSaturates = true;
inline Words add_dots(Words sums, Words codes, int32_t four) {
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(four));
  return sums + (Words)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__)
constexpr bool kSaturates = true;
inline Words add_dots(Words sums, Words codes, int32_t four) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(four));
  return sums + (Words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr bool kSaturates = false;
inline Words add_dots(Words sums, Words codes, int32_t four) {
  for (int i = 0; i < 4; ++i) {
    const int32_t x = static_cast<int8_t>(static_cast<uint32_t>(four) >> (8 * i));
    sums += (codes >> (8 * i) & 0xff) * static_cast<uint32_t>(x);
  }
  return sums;
}
#endif

// Codes of all 8 bits: where sums of two products would saturate, upper and lower bits apart.
template <bool kWide>
inline Words add_products(Words sums, Words codes, int32_t four) {
  if constexpr (kWide && kSaturates) {
    sums += add_dots(Words{}, codes >> 4 & 0x0f0f0f0f, four) << 4;
    return add_dots(sums, codes & 0x0f0f0f0f, four);
  } else {
    return add_dots(sums, codes, four);
  }
}

// Where a tile of packed rows has what: integers [units][rows][digits][2], four a word; then of each block the rows' scales
// and where the sums of their products begin [rows][digits]; then the sums of groups [groups][rows].
struct PackedRows {
  int64_t infos, sums, size;
  PackedRows(const Quantized& q, int64_t rows, int digits) {
    infos = num_units(q) * 2 * digits * rows;
    sums = infos + blocks_of_group(q) * q.groups * (1 + digits) * rows;
    size = sums + q.groups * rows;
  }
};

// A prepared panel: scales [groups][32], offsets [groups][32], and widened codes.
struct Prepared {
  float *scales, *offsets;
  uint8_t* bytes;
  Prepared(const LinearArgs& a, int64_t panel) {
    scales = a.prepared + panel % kSlots * size(a);
    offsets = scales + a.quant.groups * kPanel;
    bytes = reinterpret_cast<uint8_t*>(offsets + a.quant.groups * kPanel);
  }
  static int64_t size(const LinearArgs& a) {
    return 2 * kPanel * a.quant.groups + (is_widened(a) ? num_units(a.quant) * kByteUnitBytes / 4 : 0);
  }
};

// A row's sum of its digits' sums, each in units of the first one.
template <int D>
inline Vec sum_of_digits(const Words (&sums)[D]) {
  Vec total = to_vec(sums[D - 1]);
  unroll<D - 1>([&](int d) VLLM_INLINE { total = fma(total, set1(1.0f / 128.0f), to_vec(sums[D - 2 - d])); });
  return total;
}

template <typename C, int R, int P, int D>
[[gnu::noinline]] void multiply_lanes(const LinearArgs& a, const float* x, int64_t panel, const uint8_t* codes,
                                      int64_t codes_stride, int lane, Vec* totals_out) {
  const Quantized& q = a.quant;
  const PackedRows at(q, R, D);
  const float* prepared[P];
  for (int p = 0; p < P; ++p) prepared[p] = Prepared(a, panel + p).scales + lane;
  NextPanels next(a, panel, P);
  const bool fetches = !is_widened(a) && (kGroups == 1 || lane == 0);
  const bool offsets = has_offsets(q);
  const float *infos = x + at.infos, *group_sums = x + at.sums;
  Vec totals[R][P][2];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) totals[r][p][0] = totals[r][p][1] = zero();
  }
  for (int64_t g = 0; g < q.groups; ++g) {
    for (int64_t left = units_of_group(q); left > 0; left -= kBlockUnits, infos += (1 + D) * R) {
      Words sums[R][P][2][D];
      unroll<R * D>([&](auto i) VLLM_INLINE {
        constexpr int r = i / D, d = i % D;
        int32_t start;
        std::memcpy(&start, infos + R + i, sizeof(start));
        unroll<P>([&](int p) VLLM_INLINE {
          sums[r][p][0][d] = sums[r][p][1][d] = Words{} + static_cast<uint32_t>(start);
        });
      });
      for (int64_t u = least(left, kBlockUnits); u > 0; --u, x += 2 * D * R, codes += kPanel * C::kBits) {
        if (fetches) next.fetch<C::kBits, P>();
        unroll<P>([&](int p) VLLM_INLINE {
          const C unit(codes + p * codes_stride, lane);
          unroll<2>([&](auto part) VLLM_INLINE {
            const Words low = unit.template get<0, part>(), high = unit.template get<1, part>();
            unroll<R * D>([&](auto i) VLLM_INLINE {
              constexpr int r = i / D, d = i % D;
              int32_t four;
              std::memcpy(&four, x + 2 * i + part, sizeof(four));
              sums[r][p][0][d] = add_products<C::kWide>(sums[r][p][0][d], low, four);
              sums[r][p][1][d] = add_products<C::kWide>(sums[r][p][1][d], high, four);
            });
          });
        });
      }
      unroll<P>([&](int p) VLLM_INLINE {
        const Vec low = load(prepared[p] + g * kPanel), high = load(prepared[p] + g * kPanel + 16);
        unroll<R>([&](int r) VLLM_INLINE {
          const Vec scale = set1(infos[r]);
          totals[r][p][0] = fma(sum_of_digits(sums[r][p][0]) * low, scale, totals[r][p][0]);
          totals[r][p][1] = fma(sum_of_digits(sums[r][p][1]) * high, scale, totals[r][p][1]);
        });
      });
    }
    if (offsets) {
      unroll<P>([&](int p) VLLM_INLINE {
        const float* shifts = prepared[p] + (q.groups + g) * kPanel;
        const Vec low = load(shifts), high = load(shifts + 16);
        unroll<R>([&](int r) VLLM_INLINE {
          const Vec sum = set1(group_sums[g * R + r]);
          totals[r][p][0] = fma(sum, low, totals[r][p][0]);
          totals[r][p][1] = fma(sum, high, totals[r][p][1]);
        });
      });
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p, totals_out += 2) {
      totals_out[0] = totals[r][p][0];
      totals_out[1] = totals[r][p][1];
    }
  }
}

template <typename T, int D>
struct QuantizedInt8Product {
  using Row = T;
  using Element = float;
  static constexpr int kMaxRows = (kLanes == 16 ? 12 : kLanes == 8 ? 5 : 3) / D;
  static constexpr int64_t kPanelsAtATime = kSlots;

  static constexpr int panels_at_once(int rows) {
    return rows * D <= (D == 1 ? kDirectRows : 2 * D) && (kLanes == 16 || rows == 1) ? 2 : 1;
  }

  static int64_t panel_size(const LinearArgs& a) { return a.quant.at.size; }
  static int64_t packed_row(const LinearArgs& a) { return PackedRows(a.quant, 1, D).size; }
  static int64_t prepared_size(const LinearArgs& a) { return kSlots * Prepared::size(a); }

  static void pack_row(const LinearArgs& a, const T* x, int64_t r, int64_t rows, float* out) {
    const Quantized& q = a.quant;
    const PackedRows at(q, rows, D);
    float *words = out + 2 * D * r, *infos = out + at.infos, *sums = out + at.sums + r;
    for (int64_t g = 0; g < q.groups; ++g, sums += rows) {
      const int64_t begin = g * q.group_size, end = least(begin + q.group_size, a.inner);
      float sum = 0.0f;
      for (int64_t u = 0; u < units_of_group(q); u += kBlockUnits, infos += (1 + D) * rows) {
        const int64_t k = begin + u * kUnit;
        const Rounded<D> block = round_block<D>(q, x, k, end);
        infos[r] = block.scale;
        sum += block.sum();
        const int64_t num_units = least(kBlockUnits, units_of_group(q) - u);
        for (int d = 0; d < D; ++d) {
          const int32_t start = -constant_zero(q) * block.sums[d];
          std::memcpy(infos + rows + r * D + d, &start, sizeof(start));
          for (int64_t i = 0; i < num_units; ++i) {
            const uint64_t unit = block.unit(q, d, i);
            std::memcpy(words + (i * rows * D + d) * 2, &unit, sizeof(unit));
          }
        }
        words += num_units * 2 * D * rows;
      }
      *sums = sum;
    }
  }

  static void prepare(const LinearArgs& a, int64_t panel, int64_t stop) {
    const Quantized& q = a.quant;
    for (; panel < stop; ++panel) {
      const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + panel * q.at.size;
      const Prepared to(a, panel);
      widen_scales(q, weight, to.scales, to.offsets);
      if (is_widened(a)) {
        with_byte_codes(q, [&](auto* kind) { widen_to_bytes<std::remove_cvref_t<decltype(*kind)>>(weight, num_units(q), to.bytes); });
      }
    }
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const float* x, int64_t row, int64_t panel, Ahead) {
    const int64_t size = panel_size(a);
    for (int lane = 0; lane < 16; lane += kLanes) {
      Vec totals[R][P][2];
      if (is_widened(a)) {
        const uint8_t *bytes = Prepared(a, panel).bytes, *last = Prepared(a, panel + P - 1).bytes;
        // Where nothing saturates, wide codes are as all others.
        if (kSaturates && a.quant.bits == 8) {
          multiply_lanes<WholeBytes<kSaturates>, R, P, D>(a, x, panel, bytes, last - bytes, lane, totals[0][0]);
        } else {
          multiply_lanes<WholeBytes<false>, R, P, D>(a, x, panel, bytes, last - bytes, lane, totals[0][0]);
        }
      } else if constexpr (R <= kDirectRows) {
        with_byte_codes(a.quant, [&](auto* kind) {
          multiply_lanes<std::remove_cvref_t<decltype(*kind)>, R, P, D>(
              a, x, panel, static_cast<const uint8_t*>(a.weight) + panel * size, size, lane, totals[0][0]);
        });
      }
      write_tile<T>(a, totals, row, panel, lane);
    }
  }
};

}  // namespace

void linear_quantized_int8(const LinearArgs& a) {
  VLLM_DISPATCH_DTYPE(a.dtype, Gemm<QuantizedInt8Product<scalar_t, 1>>::run(a));
}

#if defined(__AVX512VNNI__)
bool linear_quantized_digits(LinearArgs a) {
  if (a.dtype == DType::f32 || a.quant.values != Values::integers || a.quant.sparse_starts != nullptr) return false;
  a.quant.zero_in_codes = true;
  if (a.dtype == DType::bf16) {
    Gemm<QuantizedInt8Product<BF16, kAllDigits>>::run(a);
  } else {
    Gemm<QuantizedInt8Product<F16, kAllDigits>>::run(a);
  }
  return true;
}
#else
bool linear_quantized_digits(LinearArgs) { return false; }
#endif

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
