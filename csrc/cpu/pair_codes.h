// Codes of quantised weights as pairs of bfloat16, widened in registers. A unit's pairs are k = 0 to 3 with k + 4; of integers
// of 8 bits 0 and 2, 1 and 3, 4 and 6, 5 and 7.
//
// Include only from kernels/*.cpp.
#pragma once

#include "quantized_panels.h"

#if defined(__AVX512BF16__)
namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kPairs = kUnit / 2;

// Where a unit's values stand in pairs, if k does not stand with k + 4.
inline bool pairs_in_words(const Quantized& q) { return q.bits == 8 && q.values == Values::integers; }

// Join the lower 16 bits of the first vector's words and the upper ones of the second's.
inline __m512i join_halves(__m512i lower, __m512i upper) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), lower, upper, 0xca);
}

// A plane's codes of a unit and 16 columns in words of 16 bits: codes<half, pair>() are those at k = pair and, above them,
// at k = pair + 4; above their bits is anything.
template <int kBits>
struct PairPlane;

template <>
struct PairPlane<4> {
  static constexpr int kBytes = 128;
  __m512i words[2];
  explicit PairPlane(const uint8_t* unit) : words{_mm512_loadu_si512(unit), _mm512_loadu_si512(unit + 64)} {}
  template <int half, int pair>
  __m512i codes() const {
    return _mm512_srli_epi16(words[half], 4 * pair);
  }
};

template <>
struct PairPlane<2> {
  static constexpr int kBytes = 64;
  __m512i words[2];
  explicit PairPlane(const uint8_t* unit) {
    const __m512i all = _mm512_loadu_si512(unit), eighth = _mm512_srli_epi32(all, 8);
    words[0] = join_halves(all, _mm512_slli_epi32(all, 8));
    words[1] = join_halves(_mm512_srli_epi32(all, 16), eighth);
  }
  template <int half, int pair>
  __m512i codes() const {
    return _mm512_srli_epi16(words[half], 2 * pair);
  }
};

template <>
struct PairPlane<1> {
  __m512i words[2];
  explicit PairPlane(const uint8_t* unit) {
    const __m512i all = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)unit));
    words[0] = join_halves(all, _mm512_slli_epi32(all, 12));
    words[1] = join_halves(_mm512_srli_epi32(all, 8), _mm512_slli_epi32(all, 4));
  }
  template <int half, int pair>
  __m512i codes() const {
    return _mm512_srli_epi16(words[half], pair);
  }
};

template <int kLow, int kHigh>
struct TwoPairPlanes {
  PairPlane<kLow> low;
  PairPlane<kHigh> high;
  explicit TwoPairPlanes(const uint8_t* unit) : low(unit), high(unit + PairPlane<kLow>::kBytes) {}
  template <int half, int pair>
  __m512i codes() const {
    const __m512i mask = _mm512_set1_epi16((1 << kLow) - 1);
    const __m512i upper = _mm512_slli_epi16(high.template codes<half, pair>(), kLow);
    return _mm512_ternarylogic_epi32(mask, low.template codes<half, pair>(), upper, 0xca);
  }
};

template <int kBits>
struct PairPlanes : PairPlane<kBits> {
  using PairPlane<kBits>::PairPlane;
};
template <>
struct PairPlanes<3> : TwoPairPlanes<2, 1> {
  using TwoPairPlanes<2, 1>::TwoPairPlanes;
};
template <>
struct PairPlanes<5> : TwoPairPlanes<4, 1> {
  using TwoPairPlanes<4, 1>::TwoPairPlanes;
};
template <>
struct PairPlanes<6> : TwoPairPlanes<4, 2> {
  using TwoPairPlanes<4, 2>::TwoPairPlanes;
};

// Two vectors of floats that are bfloat16, in order.
inline __m512i narrow_two(Vec first, Vec second) { return (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v); }

// 32 integers from `first` on.
inline __m512i integers_from(float first) { return narrow_two(iota() + set1(first), iota() + set1(first + 16.0f)); }

// A kind of codes: values<half, pair>(unit) are their values. Integers of up to 6 bits lack nothing of the weight's zero.
//
// Any kind: as floats, which become bfloat16.
template <int kBits_, Values kValues>
struct FloatPairs {
  static constexpr int kBits = kBits_;
  static constexpr bool kInWords = kBits == 8 && kValues == Values::integers;
  using Wide = Codes<kBits, kValues>;
  struct Unit : Wide::Unit {
    explicit Unit(const uint8_t* unit) : Wide::Unit(unit, 0) {}
  };
  Wide wide;
  explicit FloatPairs(const LinearArgs& a) : wide(a, nullptr, 0) {}
  template <int half, int pair>
  __m512i values(const Unit& unit) const {
    constexpr int k = kInWords ? pair / 2 * 4 + pair % 2 : pair;
    const __m512i first = (__m512i)wide.get(unit, half, k).v;
    return join_halves(_mm512_srli_epi32(first, 16), (__m512i)wide.get(unit, half, k + (kInWords ? 2 : kPairs)).v);
  }
};

template <int kBits_, Values kValues>
struct PairCodes : FloatPairs<kBits_, kValues> {
  using FloatPairs<kBits_, kValues>::FloatPairs;
};

// Up to 5 bits: by a table that is repeated if it has fewer values, so that bits above a code do not count.
template <int kBits_>
struct TableOfPairs {
  static constexpr int kBits = kBits_;
  using Unit = PairPlanes<kBits>;
  __m512i table;
  explicit TableOfPairs(__m512i table) : table(table) {}
  template <int half, int pair>
  __m512i values(const Unit& unit) const {
    return _mm512_permutexvar_epi16(unit.template codes<half, pair>(), table);
  }
};

template <int kBits_>
struct PairCodes<kBits_, Values::table> : TableOfPairs<kBits_> {
  explicit PairCodes(const LinearArgs& a)
      : TableOfPairs<kBits_>(narrow_two(load(a.quant.table), load(a.quant.table))) {}
};

template <>
struct PairCodes<5, Values::integers> : TableOfPairs<5> {
  explicit PairCodes(const LinearArgs& a) : TableOfPairs<5>(integers_from(-a.quant.zero)) {}
};

template <>
struct PairCodes<6, Values::integers> {
  static constexpr int kBits = 6;
  using Unit = PairPlanes<6>;
  __m512i low, high;
  explicit PairCodes(const LinearArgs& a) : low(integers_from(-a.quant.zero)), high(integers_from(32.0f - a.quant.zero)) {}
  template <int half, int pair>
  __m512i values(const Unit& unit) const {
    return _mm512_permutex2var_epi16(low, unit.codes<half, pair>(), high);
  }
};

// Integers of 8 bits: magnitudes are indices of a table of each byte of a bfloat16. For one row this is the fastest way; where
// many products stand between, FloatPairs is.
struct BytePairs {
  static constexpr int kBits = 8;
  struct Unit {
    __m512i words[2][2];
    explicit Unit(const uint8_t* unit) {
      unroll<4>([&](auto i) VLLM_INLINE { words[i % 2][i / 2] = _mm512_loadu_si512(unit + 64 * i); });
    }
  };
  __m512i lower[2], upper[2];
  explicit BytePairs(const LinearArgs&) {
    unroll<2>([&](auto i) VLLM_INLINE {
      const __m512i first = integers_from(64.0f * i), second = integers_from(64.0f * i + 32.0f);
      lower[i] = narrow_bytes(first, second);
      upper[i] = narrow_bytes(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    });
  }
  template <int half, int pair>
  __m512i values(const Unit& unit) const {
    const __m512i codes = unit.words[half][pair / 2], magnitudes = _mm512_abs_epi8(codes);
    const __m512i low = _mm512_permutex2var_epi8(lower[0], magnitudes, lower[1]);
    const __m512i high = _mm512_permutex2var_epi8(upper[0], magnitudes, upper[1]);
    // -128 finds the entry of 0, whose lower byte is the same.
    const __mmask64 least = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-128));
    const __m512i unsigned_high = _mm512_mask_mov_epi8(high, least, _mm512_set1_epi8(0x43));
    // The sign bit of the codes.
    const __m512i signed_high = _mm512_ternarylogic_epi32(_mm512_set1_epi8(-128), codes, unsigned_high, 0xca);
    const __m512i bytes = _mm512_set1_epi16(0xff);
    if constexpr (pair % 2 == 0) return _mm512_ternarylogic_epi32(bytes, low, _mm512_slli_epi16(signed_high, 8), 0xca);
    return _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(low, 8), signed_high, 0xca);
  }

 private:
  // The lower bytes of words of 16 bits.
  static __m512i narrow_bytes(__m512i first, __m512i second) {
    const __m256i low = _mm512_cvtepi16_epi8(first), high = _mm512_cvtepi16_epi8(second);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
};

// Calls f with the type of codes of a weight whose values are bfloat16, as the type of a null pointer. `rows`: those that
// widened codes are multiplied with at once.
template <int rows, typename F>
inline void with_pair_codes(const Quantized& q, const F& f) {
#define VLLM_CODES(bits, values) f(static_cast<const PairCodes<bits, values>*>(nullptr))
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
      if constexpr (rows <= 4) {
        if (q.values == Values::integers) return f(static_cast<const BytePairs*>(nullptr));
      }
      return q.values == Values::integers ? VLLM_CODES(8, Values::integers)
             : q.values == Values::e4m3   ? VLLM_CODES(8, Values::e4m3)
                                          : VLLM_CODES(8, Values::e5m2);
  }
#undef VLLM_CODES
}

// Bytes of a unit's widened codes: [pair][half][16][2].
constexpr int64_t kUnitBytes = kUnit * kPanel * 2;

// Widens units of a panel.
template <typename C>
[[gnu::noinline]] void widen_pairs(const LinearArgs& a, const uint8_t* codes, int64_t units, uint8_t* to) {
  // How far ahead to fetch codes: what the hardware fetches by itself stops at each page.
  constexpr int64_t kAhead = 2048;
  const C kind(a);
  for (int64_t u = 0; u < units; ++u, codes += kPanel * C::kBits, to += kUnitBytes) {
    for (int i = 0; i < kPanel * C::kBits; i += 64) __builtin_prefetch(codes + kAhead + i);
    const typename C::Unit unit(codes);
    unroll<kPairs>([&](auto pair) VLLM_INLINE {
      _mm512_storeu_si512(to + 128 * pair, kind.template values<0, pair>(unit));
      _mm512_storeu_si512(to + 128 * pair + 64, kind.template values<1, pair>(unit));
    });
  }
}

// Values of x for codes [k, k + kUnit) of a group that ends at `end`, then zeros; in the order of a unit's pairs.
struct UnitOfRow {
  __m128i values, pairs;
  UnitOfRow(const Quantized& q, const BF16* x, int64_t k, int64_t end, bool in_words) {
    constexpr int kInWords = _MM_SHUFFLE(3, 1, 2, 0);
    const bool is_whole = q.order == nullptr && k + kUnit <= end;
    values = is_whole ? _mm_loadu_si128((const __m128i*)(x + k)) : some(q, x, k, end);
    const __m128i halves = _mm_unpacklo_epi16(values, _mm_unpackhi_epi64(values, values));
    const __m128i words = _mm_shufflehi_epi16(_mm_shufflelo_epi16(values, kInWords), kInWords);
    pairs = in_words ? words : halves;
  }

 private:
  [[gnu::noinline]] static __m128i some(const Quantized& q, const BF16* x, int64_t k, int64_t end) {
    BF16 unit[kUnit] = {};
    for (int i = 0; i < kUnit && k + i < end; ++i) unit[i] = x[q.order == nullptr ? k + i : q.order[k + i]];
    return _mm_loadu_si128((const __m128i*)unit);
  }
};

// The sum of a row's values, four at a time.
struct SumOfRow {
  __m128 sums = _mm_setzero_ps();
  void add(__m128i values) { sums = _mm_dpbf16_ps(sums, (__m128bh)values, (__m128bh)_mm_set1_epi16(0x3f80)); }
  float total() const { return sums[0] + sums[1] + (sums[2] + sums[3]); }
};

inline bool are_bfloat16(const float* values, int count) {
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    if ((bits & 0xffff) != 0) return false;
  }
  return true;
}

// Whether all values of a weight are bfloat16, and nothing is added to them.
inline bool has_bfloat16_values(const Quantized& q) {
  if (q.sparse_starts != nullptr || q.values == Values::tables) return false;
  return q.bits > 4 || are_bfloat16(q.table, 16);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
