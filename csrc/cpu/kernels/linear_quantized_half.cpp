// linear_quantized of bfloat16 in float16 arithmetic, with the sums of HalfProduct: as unquantised weights are multiplied at
// this level. Other levels, and kinds of weights that float16 would not pay for, take linear_quantized.
//
// Each column is scaled by a power of two into float16's range; a weight is one fused multiply-add of its code's value with
// the group's scale and offset, all in float16. For few rows weights are widened into the first-level cache, kHalfSum k at a
// time, and for many a panel is widened once for all of them; either way the same numbers are summed in the same order: a
// row's results do not depend on the other rows of the batch.
#include "../half_product.h"
#include "../quantized_panels.h"

namespace vllm_cpu {
namespace VLLM_ISA {

#if defined(__AVX512FP16__)
namespace {

// How far ahead to fetch codes: what the hardware fetches by itself stops at each page.
constexpr int64_t kCodesAhead = 2048;
constexpr int64_t kChunkUnits = HalfProduct::kHalfSum / kUnit;

// Of two vectors of words, the lower halves of the first and the upper halves of the second.
inline __m512i halves_of(__m512i lower, __m512i upper) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), lower, upper, 0xca);
}

// Of words of columns c and of c + 16, the lower, or upper, halves side by side.
inline __m512i lower_halves(__m512i first, __m512i second) { return halves_of(first, _mm512_slli_epi32(second, 16)); }
inline __m512i upper_halves(__m512i first, __m512i second) { return halves_of(_mm512_srli_epi32(first, 16), second); }

// A unit's codes of one plane, in words of 16 bits, columns c and c + 16 side by side: codes<k>() are those at one k; above
// their bits is anything.
template <int kBits>
struct HalfPlane;

template <>
struct HalfPlane<4> {
  static constexpr int kBytes = 128;
  __m512i words[2];
  explicit HalfPlane(const uint8_t* unit) {
    const __m512i first = _mm512_loadu_si512(unit), second = _mm512_loadu_si512(unit + 64);
    words[0] = lower_halves(first, second);
    words[1] = upper_halves(first, second);
  }
  template <int k>
  __m512i codes() const {
    return _mm512_srli_epi16(words[k / 4], k % 4 * 4);
  }
};

template <>
struct HalfPlane<2> {
  static constexpr int kBytes = 64;
  __m512i words;
  explicit HalfPlane(const uint8_t* unit) : words(_mm512_loadu_si512(unit)) {}
  template <int k>
  __m512i codes() const {
    return _mm512_srli_epi16(words, 2 * k);
  }
};

template <>
struct HalfPlane<1> {
  __m512i words;
  explicit HalfPlane(const uint8_t* unit) : words(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)unit))) {
    words = halves_of(words, _mm512_slli_epi32(words, 8));
  }
  template <int k>
  __m512i codes() const {
    return _mm512_srli_epi16(words, k);
  }
};

template <int kLow, int kHigh>
struct TwoHalfPlanes {
  HalfPlane<kLow> low;
  HalfPlane<kHigh> high;
  explicit TwoHalfPlanes(const uint8_t* unit) : low(unit), high(unit + HalfPlane<kLow>::kBytes) {}
  template <int k>
  __m512i codes() const {
    const __m512i mask = _mm512_set1_epi16((1 << kLow) - 1);
    return _mm512_ternarylogic_epi32(mask, low.template codes<k>(), _mm512_slli_epi16(high.template codes<k>(), kLow), 0xca);
  }
};

template <int kBits>
struct HalfPlanes : HalfPlane<kBits> {
  using HalfPlane<kBits>::HalfPlane;
};
template <>
struct HalfPlanes<3> : TwoHalfPlanes<2, 1> {
  using TwoHalfPlanes<2, 1>::TwoHalfPlanes;
};
template <>
struct HalfPlanes<5> : TwoHalfPlanes<4, 1> {
  using TwoHalfPlanes<4, 1>::TwoHalfPlanes;
};
template <>
struct HalfPlanes<6> : TwoHalfPlanes<4, 2> {
  using TwoHalfPlanes<4, 2>::TwoHalfPlanes;
};

// Bytes of columns c and c + 16, by pairs of k.
struct HalfBytes {
  __m512i words[4];
  explicit HalfBytes(const uint8_t* unit) {
    unroll<2>([&](auto i) VLLM_INLINE {
      const __m512i first = _mm512_loadu_si512(unit + 128 * i), second = _mm512_loadu_si512(unit + 128 * i + 64);
      words[2 * i] = lower_halves(first, second);
      words[2 * i + 1] = upper_halves(first, second);
    });
  }
};

struct HalfFloats {
  const uint8_t* bytes;
  explicit HalfFloats(const uint8_t* unit) : bytes(unit) {}
  template <int k>
  __m256i codes() const {
    return _mm256_loadu_si256((const __m256i*)(bytes + k * kPanel));
  }
};

// A kind of codes: values<k>(unit) are float16 in the order of HalfPlane; none exceeds `greatest`, and those of the
// weight are `factor` times as large.
template <int kBits_, Values kValues>
struct HalfCodes;

// Up to 5 bits: by a table, with the values of which the scales lack nothing.
template <int kBits_>
struct HalfTable {
  static constexpr int kBits = kBits_;
  using Unit = HalfPlanes<kBits>;
  __m512i table;
  float greatest, factor;
  explicit HalfTable(const float* values) {
    constexpr int kSize = 1 << kBits;
    greatest = 0.0f;
    for (int i = 0; i < kSize; ++i) greatest = __builtin_fmaxf(greatest, __builtin_fabsf(values[i]));
    // A power of two: integers stay so.
    const bool is_scaled = greatest > 0.0f && greatest < __builtin_inff();
    factor = is_scaled ? __builtin_ldexpf(1.0f, __builtin_ilogbf(greatest)) : 1.0f;
    _Float16 halves[32];
    for (int i = 0; i < 32; ++i) halves[i] = static_cast<_Float16>(values[i % kSize] / factor);
    std::memcpy(&table, halves, sizeof(table));
    greatest /= factor;
  }
  template <int k>
  __m512h values(const Unit& unit) const {
    return (__m512h)_mm512_permutexvar_epi16(unit.template codes<k>(), table);
  }
};

template <int kBits_>
struct HalfCodes<kBits_, Values::table> : HalfTable<kBits_> {
  explicit HalfCodes(const Quantized& q) : HalfTable<kBits_>(q.table) {}
};

template <>
struct HalfCodes<5, Values::integers> : HalfTable<5> {
  explicit HalfCodes(const Quantized&) : HalfTable<5>(numbers().data) {}

 private:
  struct Numbers {
    float data[32];
  };
  static Numbers numbers() {
    Numbers result;
    for (int i = 0; i < 32; ++i) result.data[i] = static_cast<float>(i);
    return result;
  }
};

template <>
struct HalfCodes<6, Values::integers> {
  static constexpr int kBits = 6;
  using Unit = HalfPlanes<6>;
  static constexpr float greatest = 63.0f, factor = 1.0f;
  explicit HalfCodes(const Quantized&) {}
  template <int k>
  __m512h values(const Unit& unit) const {
    return _mm512_cvtepu16_ph(_mm512_and_si512(unit.codes<k>(), _mm512_set1_epi16(63)));
  }
};

template <>
struct HalfCodes<8, Values::integers> {
  static constexpr int kBits = 8;
  using Unit = HalfBytes;
  static constexpr float greatest = 128.0f, factor = 1.0f;
  explicit HalfCodes(const Quantized&) {}
  template <int k>
  __m512h values(const Unit& unit) const {
    // The shift back brings the sign.
    const __m512i pair = unit.words[k / 2];
    return _mm512_cvtepi16_ph(_mm512_srai_epi16(k % 2 == 0 ? _mm512_slli_epi16(pair, 8) : pair, 8));
  }
};

template <>
struct HalfCodes<8, Values::e4m3> {
  static constexpr int kBits = 8;
  using Unit = HalfFloats;
  // The float16 are the values over 256, see even_e4m3, and so are those that the scales are for.
  static constexpr float greatest = 1.75f, factor = 1.0f;
  explicit HalfCodes(const Quantized&) {}
  template <int k>
  __m512h values(const Unit& unit) const {
    const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(unit.codes<k>()), 7);
    return (__m512h)_mm512_and_si512(words, _mm512_set1_epi16(static_cast<short>(0xbf80)));
  }
};

template <>
struct HalfCodes<8, Values::e5m2> {
  static constexpr int kBits = 8;
  using Unit = HalfFloats;
  static constexpr float greatest = 57344.0f, factor = 1.0f;
  explicit HalfCodes(const Quantized&) {}
  template <int k>
  __m512h values(const Unit& unit) const {
    return (__m512h)_mm512_slli_epi16(_mm512_cvtepu8_epi16(unit.codes<k>()), 8);
  }
};

// Calls f with the HalfCodes type of a weight, as the type of a null pointer.
template <typename F>
inline void with_half_codes(const Quantized& q, const F& f) {
#define VLLM_CODES(bits, values) f(static_cast<const HalfCodes<bits, values>*>(nullptr))
  switch (q.bits) {
    case 2:
      return VLLM_CODES(2, Values::table);
    case 3:
      return VLLM_CODES(3, Values::table);
    case 4:
      return VLLM_CODES(4, Values::table);
    case 5:
      return VLLM_CODES(5, Values::integers);
    case 6:
      return VLLM_CODES(6, Values::integers);
    default:
      return q.values == Values::integers ? VLLM_CODES(8, Values::integers)
             : q.values == Values::e4m3   ? VLLM_CODES(8, Values::e4m3)
                                          : VLLM_CODES(8, Values::e5m2);
  }
#undef VLLM_CODES
}

// Whether the weight is of one of HalfCodes' kinds, and nothing is added to it.
bool fits(const Quantized& q) { return q.values != Values::tables && q.sparse_starts == nullptr; }

// What a packed row consists of: groups filled up to whole units.
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
    const Quantized& q = a.quant;
    const int64_t inner = packed_inner(a);
    if (q.order == nullptr && inner == a.inner) return HalfProduct::pack_values(x, inner, r, rows, out);
    const Scratch<BF16> placed(inner);
    std::memset(placed.get(), 0, static_cast<size_t>(inner) * sizeof(BF16));
    for (int64_t g = 0; g < q.groups; ++g) {
      BF16* to = placed.get() + g * units_of_group(q) * kUnit;
      const int64_t begin = g * q.group_size, end = least(begin + q.group_size, a.inner);
      for (int64_t k = begin; k < end; ++k) *to++ = x[q.order == nullptr ? k : q.order[k]];
    }
    HalfProduct::pack_values(placed.get(), inner, r, rows, out);
  }

  static int64_t prepared_size(const LinearArgs& a) { return kPanelsAtATime * Prepared::size(a) + kHeader; }

  static void prepare(const LinearArgs& a, int64_t panel, int64_t stop) {
    std::memcpy(a.prepared, &panel, sizeof(panel));
    with_half_codes(a.quant, [&](auto* null) {
      const std::remove_cvref_t<decltype(*null)> kind(a.quant);
      for (; panel < stop; ++panel) {
        const Prepared to(a, panel);
        scale_columns(a, panel, kind.greatest, kind.factor, to);
        if (is_widened_once(a)) widen(kind, a, panel, to, 0, num_units(a.quant), to.values);
      }
    });
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const uint32_t* x, int64_t row, int64_t panel, Ahead ahead) {
    const int64_t inner = packed_inner(a);
    const Prepared first(a, panel);
    if (is_widened_once(a)) {
      const auto rows_from = [&](int64_t k) VLLM_INLINE { return first.values + k * kPanel; };
      HalfProduct::multiply_panels<R, P, true>(a, x, inner, rows_from, Prepared::size(a) * 2, first.scales,
                                               Prepared::size(a), row, panel, ahead);
      return;
    }
    // While these panels are widened, the next ones come from memory, a part with each chunk.
    const char* next = static_cast<const char*>(a.weight) + (panel + P) * panel_size(a);
    const int64_t chunks = (inner + HalfProduct::kHalfSum - 1) / HalfProduct::kHalfSum;
    const int64_t share = (P * panel_size(a) / 64 + chunks - 1) / chunks;
    alignas(64) _Float16 widened[P][HalfProduct::kHalfSum][kPanel];
    with_half_codes(a.quant, [&](auto* null) {
      const std::remove_cvref_t<decltype(*null)> kind(a.quant);
      const auto rows_from = [&](int64_t k) VLLM_INLINE {
        const int64_t unit = k / kUnit, stop = least(unit + kChunkUnits, num_units(a.quant));
        for (int64_t i = 0; i < share; ++i, next += 64) __builtin_prefetch(next, 0, 2);
        for (int p = 0; p < P; ++p) {
          widen(kind, a, panel + p, Prepared(a, panel + p), unit, stop, widened[p][0]);
        }
        return static_cast<const _Float16*>(widened[0][0]);
      };
      HalfProduct::multiply_panels<R, P, true>(a, x, inner, rows_from, HalfProduct::kHalfSum * kPanel, first.scales,
                                               Prepared::size(a), row, panel, ahead);
    });
  }

 private:
  // The first of the panels that are prepared.
  static constexpr int64_t kHeader = 16;

  static bool is_widened_once(const LinearArgs& a) { return a.rows > kMaxRows; }

  // What is prepared of a panel: what to multiply sums of its columns with [32], scales and offsets of groups as floats
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

  // Vectors of columns c and c + 16, as float16 side by side.
  static void store_pair(_Float16* to, Vec low, Vec high) {
    const __m512i first = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(low.v, _MM_FROUND_TO_NEAREST_INT));
    const __m512i second = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(high.v, _MM_FROUND_TO_NEAREST_INT));
    _mm512_storeu_si512(to, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  }

  // `greatest`, `factor`: of HalfCodes.
  static void scale_columns(const LinearArgs& a, int64_t panel, float greatest, float factor, const Prepared& to) {
    const Quantized& q = a.quant;
    const uint8_t* weight = static_cast<const uint8_t*>(a.weight) + panel * q.at.size;
    const Vec most = set1(greatest), times = set1(factor);
    Vec bounds[2] = {zero(), zero()};
    for (int64_t g = 0; g < q.groups; ++g) {
      for (int half = 0; half < 2; ++half) {
        const ScaleAndOffset both(q, weight, g, 16 * half);
        const Vec scale = both.scale * times;
        bounds[half] = max(bounds[half], fma(magnitude(scale), most, magnitude(both.offset)));
        store(to.wide + 2 * g * kPanel + 16 * half, scale);
        store(to.wide + (2 * g + 1) * kPanel + 16 * half, both.offset);
      }
    }
    Vec inverses[2];
    for (int half = 0; half < 2; ++half) {
      const Vec exponents = exponents_of(bounds[half]);
      inverses[half] = scale_by_power_of_two(set1(1.0f), set1(float{HalfProduct::kRowExponent}) - exponents);
      store(to.scales + 16 * half, scale_by_power_of_two(set1(1.0f), exponents - set1(float{HalfProduct::kRowExponent})));
    }
    for (int64_t g = 0; g < q.groups; ++g) {
      const float *scales = to.wide + 2 * g * kPanel, *offsets = scales + kPanel;
      store_pair(to.group_scales + g * kPanel, load(scales) * inverses[0], load(scales + 16) * inverses[1]);
      store_pair(to.group_offsets + g * kPanel, load(offsets) * inverses[0], load(offsets + 16) * inverses[1]);
    }
  }

  static Vec magnitude(Vec x) { return max(x, zero() - x); }

  // e with 2^e <= x < 2^(e + 1), within what can be scaled by; 0 for zero.
  static Vec exponents_of(Vec x) {
    const Vec least_one = set1(-120.0f), greatest_one = set1(120.0f);
    return select(gt(x, zero()), max(min(Vec{_mm512_getexp_ps(x.v)}, greatest_one), least_one), zero());
  }

  // Units [unit, stop) of a panel, as [k][32], columns c and c + 16 side by side.
  template <typename C>
  [[gnu::noinline]] static void widen(const C& all, const LinearArgs& a, int64_t panel, const Prepared& prepared,
                                      int64_t unit, int64_t stop, _Float16* to) {
    const Quantized& q = a.quant;
    const C kind = all;
    const uint8_t* codes = static_cast<const uint8_t*>(a.weight) + panel * q.at.size + unit * kPanel * C::kBits;
    const int64_t units = units_of_group(q);
    int64_t group = unit / units, left = units - unit % units;
    while (unit < stop) {
      const __m512h scale = _mm512_loadu_ph(prepared.group_scales + group * kPanel);
      const __m512h offset = _mm512_loadu_ph(prepared.group_offsets + group * kPanel);
      const int64_t end = least(unit + left, stop);
      for (; unit < end; ++unit, codes += kPanel * C::kBits, to += kUnit * kPanel) {
        for (int i = 0; i < kPanel * C::kBits; i += 64) __builtin_prefetch(codes + kCodesAhead + i);
        const typename C::Unit eight(codes);
        unroll<kUnit>([&](auto k) VLLM_INLINE {
          _mm512_storeu_ph(to + k * kPanel, _mm512_fmadd_ph(kind.template values<k>(eight), scale, offset));
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
    Gemm<QuantizedHalfProduct>::run(a);
  } else {
    linear_quantized(a);
  }
}
#else
void linear_quantized_half(const LinearArgs& a) { linear_quantized(a); }
#endif

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
