// Panels of a weight of 8-bit integers, and how rows become integers: see kernels/linear_int8.cpp.
//
// Include only from kernels/*.cpp.
#pragma once

#include "gemm.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace int8 {

constexpr int kBlock = 64;
constexpr int kGroupBlocks = 2;
// Bytes of four k in a panel, of a block, and of a group's scales.
constexpr int64_t kFourBytes = kPanel * 4;
constexpr int64_t kBytesOfBlock = kBlock * kPanel;
constexpr int64_t kScaleBytes = kPanel * sizeof(BF16);
constexpr int kBlockVectors = kBlock / kLanes;

// As __m512i, an accumulator would be converted in and out of each intrinsic, and spill.
typedef int32_t Words __attribute__((vector_size(4 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

inline int64_t num_blocks(const LinearArgs& a) { return (a.inner + kBlock - 1) / kBlock; }
inline int64_t num_groups(const LinearArgs& a) { return (num_blocks(a) + kGroupBlocks - 1) / kGroupBlocks; }
inline int64_t panel_bytes(const LinearArgs& a) {
  return num_blocks(a) * kBytesOfBlock + num_groups(a) * kScaleBytes;
}
inline const uint8_t* panel_of(const LinearArgs& a, int64_t panel) {
  return static_cast<const uint8_t*>(a.weight) + panel * panel_bytes(a);
}

// Lane i becomes the sum of lanes i and i ^ step, or what their difference is where i has that bit.
template <int step>
inline Vec butterfly(Vec x) {
  Words lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  const Floats signs = (lanes & step) != 0 ? Floats{} - 1.0f : Floats{} + 1.0f;
  const Floats swapped = __builtin_shuffle((Floats)x.v, lanes ^ step);
  return fma(x, {(decltype(Vec::v))signs}, {(decltype(Vec::v))swapped});
}

// The Hadamard transform of a block in Sylvester's order, by sums and differences of ever wider steps.
inline void rotate(Vec (&block)[kBlockVectors]) {
#pragma GCC unroll 16
  for (int i = 0; i < kBlockVectors; ++i) {
    block[i] = butterfly<2>(butterfly<1>(block[i]));
    if constexpr (kLanes > 4) block[i] = butterfly<4>(block[i]);
    if constexpr (kLanes > 8) block[i] = butterfly<8>(block[i]);
  }
#pragma GCC unroll 4
  for (int step = 1; step < kBlockVectors; step *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kBlockVectors; ++i) {
      if (i & step) continue;
      const Vec sum = block[i] + block[i + step];
      block[i + step] = block[i] - block[i + step];
      block[i] = sum;
    }
  }
}

// `left`: how many values there are; beyond them are zeros.
template <typename T>
inline void load_block(const T* x, int64_t left, Vec (&block)[kBlockVectors]) {
  if (left >= kBlock) {
#pragma GCC unroll 16
    for (int i = 0; i < kBlockVectors; ++i) block[i] = load(x + i * kLanes);
    return;
  }
  for (int i = 0; i < kBlockVectors; ++i, left -= kLanes) {
    block[i] = left > 0 ? load_n(x + i * kLanes, static_cast<int>(least(kLanes, left))) : zero();
  }
}

// Rotated blocks of a row, and the greatest absolute value of each group: not finite if any value is not. Some groups
// are rotated before the first is rounded: the way from a group's values to its scale is long, and waited for otherwise.
struct Rotated {
  static constexpr int kGroups = 8;
  alignas(64) float values[kGroups * kGroupBlocks][kBlock];
  float greatest[kGroups];

  // The factor that undoes a group's scaling to [-127, 127]; NaN if it is not finite. Below kLeast a group counts as zero: 127
  // over it would overflow.
  static constexpr float kLeast = 1e-30f;
  float scale(int group) const {
    const float absmax = greatest[group];
    return counts(absmax) ? absmax / 127.0f : absmax * 0.0f;
  }
  Vec inverse(int group) const { return set1(counts(greatest[group]) ? 127.0f / greatest[group] : 0.0f); }

 private:
  static bool counts(float absmax) { return absmax > kLeast && absmax < __builtin_inff(); }
};

// `left`: how many values there are from x on.
template <typename T>
inline void rotate_blocks(const T* x, int64_t left, int blocks, Rotated* to) {
  for (int first = 0; first < blocks; first += kGroupBlocks) {
    Vec greatest = zero(), smallest = zero(), poison = zero();
    for (int b = first; b < first + kGroupBlocks && b < blocks; ++b) {
      Vec block[kBlockVectors];
      load_block(x + b * kBlock, left - b * kBlock, block);
      rotate(block);
#pragma GCC unroll 16
      for (int i = 0; i < kBlockVectors; ++i) {
        greatest = max(greatest, block[i]);
        smallest = min(smallest, block[i]);
        store(to->values[b] + i * kLanes, block[i]);
      }
      // A value that is not finite stays so in all sums and differences.
      poison = fma(block[0], zero(), poison);
    }
    to->greatest[first / kGroupBlocks] = reduce_max(max(greatest, zero() - smallest)) + first_lane(poison);
  }
}

// Calls pack_group(rotated, block, blocks) for each group of a row: its first block in `rotated`, and how many it has.
template <typename T, typename F>
inline void rotate_row(const LinearArgs& a, const T* x, const F& pack_group) {
  for (int64_t first = 0; first < num_blocks(a); first += Rotated::kGroups * kGroupBlocks) {
    const int blocks = static_cast<int>(least(Rotated::kGroups * kGroupBlocks, num_blocks(a) - first));
    Rotated rotated;
    rotate_blocks(x + first * kBlock, a.inner - first * kBlock, blocks, &rotated);
    for (int b = 0; b < blocks; b += kGroupBlocks) {
      pack_group(rotated, b, static_cast<int>(least(kGroupBlocks, blocks - b)));
    }
  }
}

// The scales of a group in columns lane to lane + kLanes of a panel's first half, or of its second.
inline Vec load_scales(const uint8_t* panel, int64_t lane, int half) {
  return load(reinterpret_cast<const BF16*>(panel) + half * 16 + lane);
}

#ifdef __AVX512VNNI__
// A rotated block as integers, in order.
static inline __m512i round_block(const float* values, Vec inverse) {
  const auto rounded = [&](int i) { return _mm512_cvtps_epi32((load(values + i * kLanes) * inverse).v); };
  const __m512i first = _mm512_packs_epi32(rounded(0), rounded(1));
  const __m512i second = _mm512_packs_epi32(rounded(2), rounded(3));
  // Packing goes by quarters of a vector; this brings the quarters' words back in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
}

// The term that is added to sums of a group's integers times the weight's integers plus 128, to take the 128 back. `shifted`:
// the sum of the group's integers plus 128 each.
inline int32_t start_of_sums(int64_t shifted, int blocks) {
  return -128 * (static_cast<int32_t>(shifted) - blocks * kBlock * 128);
}

// The sum of 64 integers plus 128 each, in eight parts.
inline __m512i sum_shifted(__m512i bytes) {
  return _mm512_sad_epu8(_mm512_xor_si512(bytes, _mm512_set1_epi8(-128)), _mm512_setzero_si512());
}
#endif

}  // namespace int8
}  // namespace VLLM_ISA
}  // namespace vllm_cpu
