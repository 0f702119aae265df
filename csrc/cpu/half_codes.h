// Codes of quantised weights as float16, widened in registers.
//
// Include only from kernels/*.cpp.
#pragma once

#include "half_lanes.h"
#include "quantized_panels.h"

#if defined(VLLM_HAS_HALF_LANES)
namespace vllm_cpu {
namespace VLLM_ISA {

// Join the lower halves of the first vector's words and the upper halves of the second's.
inline __m512i join_halves(__m512i lower, __m512i upper) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), lower, upper, 0xca);
}

// The lower, or upper, halves of words of columns c and c + 16, side by side.
inline __m512i lower_halves(__m512i first, __m512i second) { return join_halves(first, _mm512_slli_epi32(second, 16)); }
inline __m512i upper_halves(__m512i first, __m512i second) { return join_halves(_mm512_srli_epi32(first, 16), second); }

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
    words = join_halves(words, _mm512_slli_epi32(words, 8));
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
  Halves values(const Unit& unit) const {
    return halves_of(_mm512_permutexvar_epi16(unit.template codes<k>(), table));
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
  Halves values(const Unit& unit) const {
    return from_unsigned(_mm512_and_si512(unit.codes<k>(), _mm512_set1_epi16(63)));
  }
};

template <>
struct HalfCodes<8, Values::integers> {
  static constexpr int kBits = 8;
  using Unit = HalfBytes;
  static constexpr float greatest = 128.0f, factor = 1.0f;
  explicit HalfCodes(const Quantized&) {}
  template <int k>
  Halves values(const Unit& unit) const {
    // The shift back brings the sign.
    const __m512i pair = unit.words[k / 2];
    return from_signed(_mm512_srai_epi16(k % 2 == 0 ? _mm512_slli_epi16(pair, 8) : pair, 8));
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
  Halves values(const Unit& unit) const {
    const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(unit.codes<k>()), 7);
    return halves_of(_mm512_and_si512(words, _mm512_set1_epi16(static_cast<short>(0xbf80))));
  }
};

template <>
struct HalfCodes<8, Values::e5m2> {
  static constexpr int kBits = 8;
  using Unit = HalfFloats;
  static constexpr float greatest = 57344.0f, factor = 1.0f;
  explicit HalfCodes(const Quantized&) {}
  template <int k>
  Halves values(const Unit& unit) const {
    return halves_of(_mm512_slli_epi16(_mm512_cvtepu8_epi16(unit.codes<k>()), 8));
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

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
