// 4 lanes by the compiler's vector extension: SSE2 on x86-64, NEON on Arm, plain code elsewhere.
#pragma once

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kLanes = 4;

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

struct Vec {
  Float4 v;
};
struct Mask {
  Int4 m;
};

inline Vec zero() { return {Float4{0, 0, 0, 0}}; }
inline Vec set1(float x) { return {Float4{x, x, x, x}}; }
inline Vec iota() { return {Float4{0, 1, 2, 3}}; }
inline Mask lanes_below(int n) { return {Int4{0, 1, 2, 3} < Int4{n, n, n, n}}; }

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float widen(float x) { return x; }
inline float widen(BF16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  if ((x.bits & 0x7c00) == 0x7c00) return bits_to_float(sign | 0x7f800000u | rest);
  // Multiplying by 2^112 moves the exponent's bias and normalises subnormals at once.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest) * 0x1p112f));
}
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, BF16* out) {
  const uint32_t bits = float_to_bits(x);
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, F16* out) {
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint16_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {
    // Adding one half puts the last subnormal bit at the float's last bit, so the addition itself rounds.
    half = static_cast<uint16_t>(float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u);
  } else {
    half = static_cast<uint16_t>((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13);
  }
  out->bits = sign | half;
}

template <typename T>
inline Vec load(const T* p) {
  return {Float4{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}};
}
inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x.v, p, 16);
  return x;
}
inline void load_bf16_pair(const BF16* p, Vec* low, Vec* high) {
  for (int i = 0; i < kLanes; ++i) {
    low->v[i] = widen(p[2 * i]);
    high->v[i] = widen(p[2 * i + 1]);
  }
}
template <typename T>
inline Vec load_n(const T* p, int n) {
  if (n == kLanes) return load(p);
  Vec x = zero();
  for (int i = 0; i < n; ++i) x.v[i] = widen(p[i]);
  return x;
}
template <typename T>
inline void store(T* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) narrow(x.v[i], p + i);
}
inline void store(float* p, Vec x) { std::memcpy(p, &x.v, 16); }
// A vector is less than a cache line, and parts of lines are not worth writing past the caches.
constexpr bool kStreamsLines = false;
inline void stream(float* p, Vec x) { store(p, x); }
inline void finish_streams() {}
template <typename T>
inline void store_n(T* p, Vec x, int n) {
  if (n == kLanes) return store(p, x);
  for (int i = 0; i < n; ++i) narrow(x.v[i], p + i);
}

inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }

inline Mask gt(Vec a, Vec b) { return {a.v > b.v}; }
inline Mask ge(Vec a, Vec b) { return {a.v >= b.v}; }
inline Mask lt(Vec a, Vec b) { return {a.v < b.v}; }
inline Mask le(Vec a, Vec b) { return {a.v <= b.v}; }
inline Mask eq(Vec a, Vec b) { return {a.v == b.v}; }
inline Mask operator&(Mask a, Mask b) { return {a.m & b.m}; }
inline Mask operator|(Mask a, Mask b) { return {a.m | b.m}; }
inline Mask operator~(Mask a) { return {~a.m}; }
inline int count(Mask a) { return -(a.m[0] + a.m[1] + a.m[2] + a.m[3]); }
inline bool any(Mask a) { return (a.m[0] | a.m[1] | a.m[2] | a.m[3]) != 0; }
inline Vec select(Mask m, Vec a, Vec b) {
  return {(Float4)(((Int4)a.v & m.m) | ((Int4)b.v & ~m.m))};
}
inline Vec add_where(Mask m, Vec a, Vec b) { return {a.v + (Float4)((Int4)b.v & m.m)}; }
inline Vec max(Vec a, Vec b) { return select(gt(a, b), a, b); }
inline Vec min(Vec a, Vec b) { return select(lt(a, b), a, b); }

inline Vec round(Vec a) {
  // Floats of this size have no fraction bits left, so the addition rounds to the nearest integer.
  const Vec magic = set1(12582912.0f);
  return (a + magic) - magic;
}
// The product has to be a normal float.
constexpr bool kScaleOverflows = false;
inline Vec scale_by_power_of_two(Vec a, Vec n) {
  const Vec magic = set1(12582912.0f);
  const Int4 exponent = ((Int4)(n + magic).v - (Int4)magic.v) << 23;
  return {(Float4)((Int4)a.v + exponent)};
}
inline void split_exponent(Vec a, Vec* mantissa, Vec* exponent) {
  const Int4 whole = ((Int4)a.v - 0x3f400000) >> 23;
  mantissa->v = (Float4)((Int4)a.v - (whole << 23));
  for (int i = 0; i < kLanes; ++i) exponent->v[i] = static_cast<float>(whole[i]);
}
inline float reduce_sum(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float reduce_max(Vec a) {
  const float even = a.v[0] > a.v[2] ? a.v[0] : a.v[2], odd = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
  return even > odd ? even : odd;
}
inline float first_lane(Vec a) { return a.v[0]; }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
