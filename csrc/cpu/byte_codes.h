// Integer codes of quantised weights as bytes, and rows of x as integers of a byte each: see kernels/linear_quantized_int8.cpp.
//
// Include only from kernels/*.cpp.
#pragma once

#include "quantized_panels.h"

namespace vllm_cpu {
namespace VLLM_ISA {
// Each file that includes this has its own copy: the compiler then folds what is equal for several kinds of codes.
namespace {

// Units of a block: what has a scale of its own in a row.
constexpr int kBlockUnits = 4;
// Bytes of a unit's codes as bytes: [first four k, others][half][16][4].
constexpr int64_t kByteUnitBytes = kUnit * kPanel;

inline int64_t blocks_of_group(const Quantized& q) { return (units_of_group(q) + kBlockUnits - 1) / kBlockUnits; }
// The zero point that is subtracted from every code, as it is multiplied.
inline int32_t constant_zero(const Quantized& q) { return static_cast<int32_t>(q.zero) + (q.bits == 8 ? 128 : 0); }

// A plane's codes as bytes: of k 0, 2, 4 and 6, and of 1, 3, 5 and 7.
template <int half, int part>
inline Words bytes_of(const Plane<4>& plane) {
  return plane.words[half] >> (4 * part) & 0x0f0f0f0f;
}
template <int half, int part>
inline Words bytes_of(const Plane<2>& plane) {
  const Words eight = half == 0 ? plane.words & 0xffff : plane.words >> 16;
  const Words halves = (eight | eight << 8) & 0x00ff00ff;
  return ((halves | halves << 4) & 0x0f0f0f0f) >> (2 * part) & 0x03030303;
}
template <int half, int part>
inline Words bytes_of(const Plane<1>& plane) {
  const Words eight = half == 0 ? plane.words & 0xff : plane.words >> 8;
  const Words halves = (eight | eight << 12) & 0x000f000f;
  return ((halves | halves << 6) & 0x03030303) >> part & 0x01010101;
}
template <int half, int part, int kLow, int kHigh>
inline Words bytes_of(const TwoPlanes<kLow, kHigh>& planes) {
  return bytes_of<half, part>(planes.low) | bytes_of<half, part>(planes.high) << kLow;
}

// Integer codes of a weight: get<half, part>() brings four k of kLanes columns.
template <int kBits_>
struct ByteCodes {
  static constexpr int kBits = kBits_;
  static constexpr bool kWide = false;
  Planes<kBits> planes;
  ByteCodes(const uint8_t* unit, int lane) : planes(unit, lane) {}
  template <int half, int part>
  Words get() const {
    return bytes_of<half, part>(planes);
  }
};

// [part][half][16][4] bytes: of 8-bit codes, plus 128, or of any that were widened.
template <bool kWide_>
struct WholeBytes {
  static constexpr int kBits = 8;
  static constexpr bool kWide = kWide_;
  const uint8_t* bytes;
  WholeBytes(const uint8_t* unit, int lane) : bytes(unit + 4 * lane) {}
  template <int half, int part>
  Words get() const {
    return load_words(bytes + 128 * part + 64 * half);
  }
};

struct SignedBytes : WholeBytes<true> {
  using WholeBytes<true>::WholeBytes;
  template <int half, int part>
  Words get() const {
    return WholeBytes<true>::get<half, part>() ^ 0x80808080u;
  }
};

template <typename F>
inline void with_byte_codes(const Quantized& q, const F& f) {
  switch (q.bits) {
    case 2:
      return f(static_cast<const ByteCodes<2>*>(nullptr));
    case 3:
      return f(static_cast<const ByteCodes<3>*>(nullptr));
    case 4:
      return f(static_cast<const ByteCodes<4>*>(nullptr));
    case 5:
      return f(static_cast<const ByteCodes<5>*>(nullptr));
    case 6:
      return f(static_cast<const ByteCodes<6>*>(nullptr));
    default:
      return f(static_cast<const SignedBytes*>(nullptr));
  }
}

// Widens units of a panel.
template <typename C>
[[gnu::noinline]] void widen_to_bytes(const uint8_t* codes, int64_t units, uint8_t* to) {
  for (int lane = 0; lane < 16; lane += kLanes) {
    for (int64_t u = 0; u < units; ++u) {
      const C unit(codes + u * kPanel * C::kBits, lane);
      unroll<2>([&](auto part) VLLM_INLINE {
        unroll<2>([&](auto half) VLLM_INLINE {
          const Words words = unit.template get<half, part>();
          std::memcpy(to + u * kByteUnitBytes + 128 * part + 64 * half + 4 * lane, &words, sizeof(words));
        });
      });
    }
  }
}

typedef int8_t Bytes __attribute__((vector_size(kLanes)));

// Reorder eight bytes: the first and every second one, then the others.
inline uint64_t evens_first(uint64_t bytes) {
  const auto evens = [](uint64_t each) {
    each &= 0x00ff00ff00ff00ff;
    each = (each | each >> 8) & 0x0000ffff0000ffff;
    return (each | each >> 16) & 0xffffffff;
  };
  return evens(bytes) | evens(bytes >> 8) << 32;
}

// A block's digits, the scale of the first ones, and their sums.
template <int D>
struct Rounded {
  static constexpr int kSize = kBlockUnits * kUnit;
  alignas(64) int8_t values[D][kSize];
  float scale;
  int32_t sums[D];

  // A block of up to kSize values of x.
  template <typename T>
  Rounded(const T* x, int count) {
    float values[kSize];
    Vec greatest = zero(), poison = zero();
    for (int i = 0; i < kSize; i += kLanes) {
      const Vec some = load_n(x + i, static_cast<int>(count - i < 0 ? 0 : least(kLanes, count - i)));
      greatest = max(greatest, max(some, zero() - some));
      // A value that is not finite makes all of the block NaN.
      poison = fma(some, zero(), poison);
      store(values + i, some);
    }
    const float none = reduce_sum(poison);
    const float inverse = choose_scale(none == 0.0f ? reduce_max(greatest) : 0.0f);
    scale += none;
    SignedWords totals[D] = {};
    for (int i = 0; i < kSize; i += kLanes) {
      Vec rest = load(values + i) * set1(inverse);
      unroll<D>([&](int d) VLLM_INLINE {
        // The last digit is the nearest one, which may be 128.
        const SignedWords digit = integers(d < D - 1 ? rest : min(set1(127.0f), max(set1(-127.0f), round(rest))));
        rest = (rest - to_vec((Words)digit)) * set1(128.0f);
        totals[d] += digit;
        const Bytes bytes = __builtin_convertvector(digit, Bytes);
        std::memcpy(this->values[d] + i, &bytes, sizeof(bytes));
      });
    }
    for (int d = 0; d < D; ++d) {
      sums[d] = 0;
      for (int lane = 0; lane < kLanes; ++lane) sums[d] += totals[d][lane];
    }
  }

  // Digits d of the i-th unit, in the order of bytes of codes.
  uint64_t unit(const Quantized& q, int d, int64_t i) const {
    uint64_t bytes;
    std::memcpy(&bytes, values[d] + i * kUnit, sizeof(bytes));
    return q.bits == 8 ? bytes : evens_first(bytes);
  }

  // The sum of all values.
  float sum() const {
    float total = static_cast<float>(sums[D - 1]);
    for (int d = D - 2; d >= 0; --d) total = total / 128.0f + static_cast<float>(sums[d]);
    return total * scale;
  }

 private:
  // Sets the scale, and returns what values are multiplied with to be at most 127 or, if more digits follow, below 128;
  // then it is a power of two. 0 for a block of what is next to nothing.
  float choose_scale(float greatest) {
    scale = 0.0f;
    // Below this one over the scale would overflow.
    if (!(greatest > 1e-30f)) return 0.0f;
    if constexpr (D == 1) {
      scale = greatest / 127.0f;
      return 127.0f / greatest;
    } else {
      uint32_t bits;
      std::memcpy(&bits, &greatest, sizeof(bits));
      const uint32_t exponent = (bits >> 23) - 6, opposite = 254 - exponent;
      float inverse;
      bits = exponent << 23;
      std::memcpy(&scale, &bits, sizeof(bits));
      bits = opposite << 23;
      std::memcpy(&inverse, &bits, sizeof(bits));
      return inverse;
    }
  }

  // Towards zero.
  static SignedWords integers(Vec x) {
    Floats floats;
    std::memcpy(&floats, &x, sizeof(floats));
    return __builtin_convertvector(floats, SignedWords);
  }
};

// Values of x for codes [k, k + kBlockUnits * kUnit) of a group that ends at `end`, then zeros.
template <int D, typename T>
inline Rounded<D> round_block(const Quantized& q, const T* x, int64_t k, int64_t end) {
  const int count = static_cast<int>(end <= k ? 0 : least(end - k, kBlockUnits * kUnit));
  alignas(64) T run[kBlockUnits * kUnit] = {};
  const T* from = x + k;
  if (q.order != nullptr) {
    for (int i = 0; i < count; ++i) run[i] = x[q.order[k + i]];
    from = run;
  }
  return Rounded<D>(from, count);
}

}  // namespace
}  // namespace VLLM_ISA
}  // namespace vllm_cpu
