// Panels of a quantised weight, and how their codes become floats.
//
// A panel is 32 columns. Its inputs stand in groups; each is filled up to whole units of 8, the last one to a whole group.
// In bytes, one after another:
//
//   codes          [units][planes]: a plane's bits of 8 k and 32 columns. Planes of 4 bits are two vectors (columns c, then
//                  c + 16) of 16 words of 8 codes; of 2 bits a vector of words: 8 codes of column c, then 8 of c + 16; of
//                  one bit, the same of 16-bit words; of 8 bits [8 / 4][2][16][4]. 3, 5 and 6 bits are a plane of 2 or 4
//                  bits and one of the others. 8-bit floats: [8][16][2], columns c and c + 16 side by side.
//   scales         [groups][32], then offsets and zero points likewise. Numbers of 4 bits share the bytes of scales.
//   super-scales   [supers][32], then super-offsets likewise
//   tables         float [2^bits][32]
//
// Include only from kernels/*.cpp.
#pragma once

#include "gemm.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kUnit = 8;

// Unsigned: shifts to the right bring zeros.
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t SignedWords __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

inline int64_t units_of_group(const Quantized& q) { return (q.group_size + kUnit - 1) / kUnit; }
inline int64_t num_units(const Quantized& q) { return units_of_group(q) * q.groups; }

inline Vec to_vec(Words words) { return {(decltype(Vec::v))__builtin_convertvector((SignedWords)words, Floats)}; }
inline Vec as_vec(Words words) {
  Vec result;
  std::memcpy(&result, &words, sizeof(words));
  return result;
}

inline Words load_words(const uint8_t* p) {
  Words words;
  std::memcpy(&words, p, sizeof(words));
  return words;
}

#if defined(__AVX512F__)
inline Words widen_bytes(const uint8_t* p) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Words widen_shorts(const uint8_t* p) {
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
inline Vec widen_halves(__m256i halves) { return {_mm512_cvtph_ps(halves)}; }
// kLanes words of two bytes: the first, or the second, as the upper byte of a word.
inline Vec even_e5m2(const uint8_t* p) {
  return widen_halves(_mm256_slli_epi16(_mm256_loadu_si256((const __m256i*)p), 8));
}
inline Vec odd_e5m2(const uint8_t* p) {
  return widen_halves(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi16(static_cast<short>(0xff00))));
}
// An e4m3 in the upper byte of a word becomes a float16 of the value over 256: its sign, a zero, and the rest.
inline Vec even_e4m3(const uint8_t* p) {
  const __m256i upper = _mm256_slli_epi16(_mm256_loadu_si256((const __m256i*)p), 8);
  return widen_halves(_mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(static_cast<short>(0xbf80))));
}
inline Vec odd_e4m3(const uint8_t* p) {
  const __m256i words = _mm256_loadu_si256((const __m256i*)p);
  return widen_halves(_mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<short>(0xbf80))));
}
// Values of a table of 16 by the words' lowest four bits.
struct Table {
  __m512 values;
  explicit Table(const float* table) : values(_mm512_loadu_ps(table)) {}
  Vec operator()(Words index) const { return {_mm512_permutexvar_ps((__m512i)index, values)}; }
};
inline Vec gather(const float* base, Words index) { return {_mm512_i32gather_ps((__m512i)index, base, 4)}; }
#elif defined(__AVX2__)
inline Words widen_bytes(const uint8_t* p) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline Words widen_shorts(const uint8_t* p) {
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
inline Vec widen_halves(__m128i halves) { return {_mm256_cvtph_ps(halves)}; }
inline Vec even_e5m2(const uint8_t* p) {
  return widen_halves(_mm_slli_epi16(_mm_loadu_si128((const __m128i*)p), 8));
}
inline Vec odd_e5m2(const uint8_t* p) {
  return widen_halves(_mm_and_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi16(static_cast<short>(0xff00))));
}
inline Vec even_e4m3(const uint8_t* p) {
  const __m128i upper = _mm_slli_epi16(_mm_loadu_si128((const __m128i*)p), 8);
  return widen_halves(_mm_and_si128(_mm_srai_epi16(upper, 1), _mm_set1_epi16(static_cast<short>(0xbf80))));
}
inline Vec odd_e4m3(const uint8_t* p) {
  const __m128i words = _mm_loadu_si128((const __m128i*)p);
  return widen_halves(_mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(static_cast<short>(0xbf80))));
}
struct Table {
  __m256 low, high;
  explicit Table(const float* table) : low(_mm256_loadu_ps(table)), high(_mm256_loadu_ps(table + 8)) {}
  Vec operator()(Words index) const {
    const __m256i places = (__m256i)index;
    // A float's sign bit chooses.
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(places, 28));
    return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, places), _mm256_permutevar8x32_ps(high, places), upper)};
  }
};
inline Vec gather(const float* base, Words index) { return {_mm256_i32gather_ps(base, (__m256i)index, 4)}; }
#else
template <typename T>
inline Words widen_each(const uint8_t* p) {
  T values[kLanes];
  std::memcpy(values, p, sizeof(values));
  Words words;
  for (int i = 0; i < kLanes; ++i) words[i] = values[i];
  return words;
}
inline Words widen_bytes(const uint8_t* p) { return widen_each<uint8_t>(p); }
inline Words widen_shorts(const uint8_t* p) { return widen_each<uint16_t>(p); }
inline Vec widen_halves(Words halves) {
  F16 values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i].bits = static_cast<uint16_t>(halves[i]);
  return load(values);
}
inline Vec even_e5m2(const uint8_t* p) { return widen_halves(widen_shorts(p) << 8); }
inline Vec odd_e5m2(const uint8_t* p) { return widen_halves(widen_shorts(p) & 0xff00); }
inline Vec even_e4m3(const uint8_t* p) {
  const Words words = widen_shorts(p);
  return widen_halves((words & 0x80) << 8 | (words & 0x7f) << 7);
}
inline Vec odd_e4m3(const uint8_t* p) {
  const Words words = widen_shorts(p) >> 8;
  return widen_halves((words & 0x80) << 8 | (words & 0x7f) << 7);
}
struct Table {
  const float* values;
  explicit Table(const float* table) : values(table) {}
  Vec operator()(Words index) const {
    Vec result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = values[index[i] & 15];
    return result;
  }
};
inline Vec gather(const float* base, Words index) {
  Vec result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = base[index[i]];
  return result;
}
#endif

// kLanes numbers from place `at` of an array of a type.
template <Stored kType>
inline Vec load_stored(const uint8_t* array, int64_t at) {
  if constexpr (kType == Stored::f32) return load(reinterpret_cast<const float*>(array) + at);
  if constexpr (kType == Stored::f16) return load(reinterpret_cast<const F16*>(array) + at);
  if constexpr (kType == Stored::bf16) return load(reinterpret_cast<const BF16*>(array) + at);
  if constexpr (kType == Stored::u8) return to_vec(widen_bytes(array + at));
  if constexpr (kType == Stored::i8) return to_vec((Words)((SignedWords)(widen_bytes(array + at) << 24) >> 24));
  if constexpr (kType == Stored::u4_low) return to_vec(widen_bytes(array + at) & 15);
  if constexpr (kType == Stored::u4_high) return to_vec(widen_bytes(array + at) >> 4);
  if constexpr (kType == Stored::e8m0) return as_vec(widen_bytes(array + at) << 23);
  if constexpr (kType == Stored::e4m3) {
    const Words bytes = widen_bytes(array + at);
    // With an exponent of 0 there is no leading one: 2^-7 (1 + m / 8) should be 2^-6 m / 8.
    const Vec normal = as_vec(((bytes & 0x7f) << 20) + (120u << 23));
    const Vec least = set1(0.015625f);
    const Vec magnitude = select(lt(normal, least), normal + normal - least, normal);
    return select(lt(to_vec(bytes), set1(128.0f)), magnitude, zero() - magnitude);
  }
  return zero();
}

// Calls f(load), where load(at) brings kLanes numbers from place `at` of an array of `type`; zeros of Stored::none.
template <typename F>
inline void with_stored(Stored type, const uint8_t* array, const F& f) {
#define VLLM_STORED(type) \
  case Stored::type:      \
    return f([array](int64_t at) VLLM_INLINE { return load_stored<Stored::type>(array, at); })
  switch (type) {
    VLLM_STORED(f32);
    VLLM_STORED(f16);
    VLLM_STORED(bf16);
    VLLM_STORED(u8);
    VLLM_STORED(i8);
    VLLM_STORED(u4_low);
    VLLM_STORED(u4_high);
    VLLM_STORED(e8m0);
    VLLM_STORED(e4m3);
    VLLM_STORED(none);
  }
#undef VLLM_STORED
}

// Codes of one plane. index(half, k) brings code k of each column of a half; above its bits is anything.
template <int kBits>
struct Plane;

template <>
struct Plane<4> {
  static constexpr int kBytes = 128;
  Words words[2];
  Plane(const uint8_t* unit, int lane) : words{load_words(unit + 4 * lane), load_words(unit + 64 + 4 * lane)} {}
  Words index(int half, int k) const {
    return words[half] >> (4 * k);
  }
};

template <>
struct Plane<2> {
  static constexpr int kBytes = 64;
  Words words;
  Plane(const uint8_t* unit, int lane) : words(load_words(unit + 4 * lane)) {}
  Words index(int half, int k) const {
    return words >> (16 * half + 2 * k);
  }
};

template <>
struct Plane<1> {
  static constexpr int kBytes = 32;
  Words words;
  Plane(const uint8_t* unit, int lane) : words(widen_shorts(unit + 2 * lane)) {}
  Words index(int half, int k) const {
    return words >> (8 * half + k);
  }
};

template <int kLow, int kHigh>
struct TwoPlanes {
  Plane<kLow> low;
  Plane<kHigh> high;
  TwoPlanes(const uint8_t* unit, int lane) : low(unit, lane), high(unit + Plane<kLow>::kBytes, lane) {}
  Words index(int half, int k) const {
    constexpr uint32_t mask = (1u << kLow) - 1;
    return (low.index(half, k) & mask) | (high.index(half, k) << kLow);
  }
};

template <int kBits>
struct Planes;
template <>
struct Planes<2> : Plane<2> {
  using Plane<2>::Plane;
};
template <>
struct Planes<3> : TwoPlanes<2, 1> {
  using TwoPlanes<2, 1>::TwoPlanes;
};
template <>
struct Planes<4> : Plane<4> {
  using Plane<4>::Plane;
};
template <>
struct Planes<5> : TwoPlanes<4, 1> {
  using TwoPlanes<4, 1>::TwoPlanes;
};
template <>
struct Planes<6> : TwoPlanes<4, 2> {
  using TwoPlanes<4, 2>::TwoPlanes;
};

// A kind of codes: a Unit of 8 k of kLanes columns of each half, and get(unit, half, k), their floats at one k.
template <int kBits_, Values kValues>
struct Codes;

template <int kBits_>
struct Codes<kBits_, Values::integers> {
  static constexpr int kBits = kBits_;
  using Unit = Planes<kBits>;
  Codes(const LinearArgs&, const uint8_t*, int) {}
  Vec get(const Unit& unit, int half, int k) const {
    return to_vec(unit.index(half, k) & ((1u << kBits) - 1));
  }
};

template <>
struct Codes<8, Values::integers> {
  static constexpr int kBits = 8;
  struct Unit {
    const uint8_t* words;
    Unit(const uint8_t* unit, int lane) : words(unit + 4 * lane) {}
  };
  Codes(const LinearArgs&, const uint8_t*, int) {}
  Vec get(const Unit& unit, int half, int k) const {
    const Words words = load_words(unit.words + k / 4 * 128 + half * 64);
    return to_vec((Words)((SignedWords)(words << (24 - k % 4 * 8)) >> 24));
  }
};

template <int kBits_>
struct Codes<kBits_, Values::table> {
  static constexpr int kBits = kBits_;
  using Unit = Planes<kBits>;
  const Table table;
  Codes(const LinearArgs& a, const uint8_t*, int) : table(a.quant.table) {}
  Vec get(const Unit& unit, int half, int k) const {
    return table(unit.index(half, k));
  }
};

template <int kBits_>
struct Codes<kBits_, Values::tables> {
  static constexpr int kBits = kBits_;
  using Unit = Planes<kBits>;
  const float* tables;
  Words lanes;
  Codes(const LinearArgs& a, const uint8_t* panel, int lane)
      : tables(reinterpret_cast<const float*>(panel + a.quant.at.tables) + lane) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<uint32_t>(i);
  }
  Vec get(const Unit& unit, int half, int k) const {
    const Words rows = unit.index(half, k) & ((1u << kBits) - 1);
    return gather(tables + 16 * half, rows * kPanel + lanes);
  }
};

struct Float8Unit {
  const uint8_t* bytes;
  Float8Unit(const uint8_t* unit, int lane) : bytes(unit + 2 * lane) {}
};

template <>
struct Codes<8, Values::e4m3> {
  static constexpr int kBits = 8;
  using Unit = Float8Unit;
  Codes(const LinearArgs&, const uint8_t*, int) {}
  Vec get(const Unit& unit, int half, int k) const {
    return half == 0 ? even_e4m3(unit.bytes + k * kPanel) : odd_e4m3(unit.bytes + k * kPanel);
  }
};

template <>
struct Codes<8, Values::e5m2> {
  static constexpr int kBits = 8;
  using Unit = Float8Unit;
  Codes(const LinearArgs&, const uint8_t*, int) {}
  Vec get(const Unit& unit, int half, int k) const {
    return half == 0 ? even_e5m2(unit.bytes + k * kPanel) : odd_e5m2(unit.bytes + k * kPanel);
  }
};

// Calls f with the Codes type of a weight, as the type of a null pointer.
template <typename F>
inline void with_codes(const Quantized& q, const F& f) {
  // Where looking up four bits takes one instruction, small integers are a table's values, too.
  constexpr bool kLooksUp = kLanes == 16;
  constexpr Values kSmall = kLooksUp ? Values::table : Values::integers;
#define VLLM_CODES(bits, values) f(static_cast<const Codes<bits, values>*>(nullptr))
  switch (q.values) {
    case Values::integers:
      switch (q.bits) {
        case 2:
          return VLLM_CODES(2, kSmall);
        case 3:
          return VLLM_CODES(3, kSmall);
        case 4:
          return VLLM_CODES(4, kSmall);
        case 5:
          return VLLM_CODES(5, Values::integers);
        case 6:
          return VLLM_CODES(6, Values::integers);
        default:
          return VLLM_CODES(8, Values::integers);
      }
    case Values::table:
      return q.bits == 2   ? VLLM_CODES(2, Values::table)
             : q.bits == 3 ? VLLM_CODES(3, Values::table)
                           : VLLM_CODES(4, Values::table);
    case Values::tables:
      return q.bits == 2   ? VLLM_CODES(2, Values::tables)
             : q.bits == 3 ? VLLM_CODES(3, Values::tables)
                           : VLLM_CODES(4, Values::tables);
    case Values::e4m3:
      return VLLM_CODES(8, Values::e4m3);
    default:
      return VLLM_CODES(8, Values::e5m2);
  }
#undef VLLM_CODES
}

// Whether the values that with_codes' types give lack Quantized::zero.
inline bool lacks_zero(const Quantized& q) {
  return q.zero != 0.0f && !q.zero_in_codes && q.values != Values::table && !(kLanes == 16 && q.values == Values::integers && q.bits <= 4);
}

// Fetches the panels after those that are multiplied into the second-level cache, scales and all, a part with each unit:
// what the hardware fetches by itself stops at each page, and many requests at once would hold up the loads behind them.
struct NextPanels {
  const char* at;
  int64_t step;
  NextPanels(const LinearArgs& a, int64_t panel, int64_t panels)
      : at(static_cast<const char*>(a.weight) + (panel + panels) * a.quant.at.size),
        step(panels * a.quant.at.size / num_units(a.quant)) {}
  // Fetch a unit of so many bits a code in each of the panels: one line more is for the scales.
  template <int kBits, int kPanels>
  void fetch() {
    for (int i = 0; i < kPanels * (kPanel * kBits + 64); i += 64) __builtin_prefetch(at + i, 0, 2);
    at += step;
  }
};

inline bool has_offsets(const Quantized& q) {
  return q.offsets != Stored::none || q.zeros != Stored::none || lacks_zero(q);
}

// A panel's scales and, if it has any, offsets as floats [groups][32] each: W = scale * value + offset.
inline void widen_scales(const Quantized& q, const uint8_t* panel, float* scales, float* offsets) {
  const PanelLayout& at = q.at;
  const int64_t count = q.groups * kPanel;
  const auto widen = [count](Stored type, const uint8_t* array, float* to) {
    with_stored(type, array, [=](const auto& stored) VLLM_INLINE {
      for (int64_t i = 0; i < count; i += kLanes) store(to + i, stored(i));
    });
  };
  // Numbers [supers][32] times those of their groups.
  const auto multiply = [&q](Stored type, const uint8_t* array, float* to) {
    if (type == Stored::none) return;
    const int64_t size = q.groups / q.supers * kPanel;
    with_stored(type, array, [&](const auto& stored) VLLM_INLINE {
      for (int64_t i = 0; i < q.supers * kPanel; i += kLanes) {
        const Vec super = stored(i);
        float* first = to + i / kPanel * size + i % kPanel;
        for (int64_t group = 0; group < size; group += kPanel) store(first + group, load(first + group) * super);
      }
    });
  };
  widen(q.scales, panel + at.scales, scales);
  multiply(q.super_scales, panel + at.super_scales, scales);
  if (has_offsets(q)) {
    widen(q.offsets, panel + at.offsets, offsets);
    multiply(q.super_offsets, panel + at.super_offsets, offsets);
    const auto subtract = [=](const auto& zero_points) VLLM_INLINE {
      for (int64_t i = 0; i < count; i += kLanes) store(offsets + i, load(offsets + i) - load(scales + i) * zero_points(i));
    };
    if (q.zeros != Stored::none) with_stored(q.zeros, panel + at.zeros, subtract);
    if (lacks_zero(q)) subtract([&q](int64_t) VLLM_INLINE { return set1(q.zero); });
  }
  if (q.values == Values::e4m3) {
    // See even_e4m3.
    for (int64_t i = 0; i < count; i += kLanes) store(scales + i, load(scales + i) * set1(256.0f));
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
