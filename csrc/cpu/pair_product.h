// Products of bfloat16 with a weight whose panels hold two values of k side by side: panel [K / 2][32][2]. That is how
// the bfloat16 dot-product instructions want them, which on AMD's CPUs run at twice the rate of float32 multiply-adds.
// Levels without these instructions widen both values instead.
//
// Include only from kernels/linear.cpp.
#pragma once

#include "gemm.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kRunPairs = kRun / 2;

// How weights are fetched for soon (__builtin_prefetch's locality). A tile of so few rows is the only one, as with several
// none is so low: what it reads once displaces less of what Python and the other operators have in the caches. Not a
// function that prefetches: GCC takes one for free of effects, and drops it.
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
// CPUs of this level are Intel's, which fetch such lines past the second-level cache: an Ice Lake at 10 GB/s in place of 26.
template <int R, int kMaxRows>
constexpr int kWeightLocality = 3;
#else
template <int R, int kMaxRows>
constexpr int kWeightLocality = R < (kMaxRows + 1) / 2 ? 0 : 3;
#endif

struct PairChain {
  // Two neighbours of a row.
  using Element = uint32_t;
  using Weight = BF16;
  static constexpr int kValues = 2;
  // Rows of a tile times the panel's two vectors, plus operands, fill the register file.
  static constexpr int kMaxRows = kLanes == 16 ? 14 : kLanes == 8 ? 4 : 2;

  template <int R, int P>
  static inline void multiply(const uint32_t* x, const BF16* panel, int64_t panel_size, int64_t inner, int group,
                              Ahead& ahead, Vec (&sums)[R][P][2]) {
    for (; inner > 0; inner -= kRun, x += R * kRunPairs) {
      const int pairs = static_cast<int>(least(kRun, inner)) / 2;
      ahead();
      for (int pair = 0; pair < pairs; ++pair, panel += 2 * kPanel) {
        Weights weights[P];
        unroll<P>([&](int p) VLLM_INLINE {
          const BF16* at = panel + p * panel_size;
          if (kGroups == 1 || group == 0) {
            __builtin_prefetch(at + kAhead * 2 * kPanel, 0, kWeightLocality<R, kMaxRows>);
            __builtin_prefetch(at + kAhead * 2 * kPanel + kPanel, 0, kWeightLocality<R, kMaxRows>);
          }
          weights[p] = load_weights(at, group);
        });
        unroll<R>([&](int r) VLLM_INLINE {
          const Value value = repeat(x[r * kRunPairs + pair]);
          unroll<P>([&](int p) VLLM_INLINE { add_products(value, weights[p], sums[r][p]); });
        });
      }
    }
  }

 private:
  // Pairs to fetch ahead, as many bytes as in linear.cpp.
  static constexpr int kAhead = 24;

#if defined(__AVX512BF16__)
  struct Weights {
    __m512bh low, high;
  };
  using Value = __m512bh;

  static Weights load_weights(const BF16* row, int) {
    return {(__m512bh)_mm512_loadu_si512(row), (__m512bh)_mm512_loadu_si512(row + kPanel)};
  }
  static Value repeat(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)); }
  static void add_products(const Value& value, const Weights& weights, Vec (&sums)[2]) {
    sums[0].v = _mm512_dpbf16_ps(sums[0].v, weights.low, value);
    sums[1].v = _mm512_dpbf16_ps(sums[1].v, weights.high, value);
  }
#else
  struct Weights {
    Vec low[2], high[2];
  };
  struct Value {
    Vec first, second;
  };

  static Weights load_weights(const BF16* row, int group) {
    Weights result;
    load_bf16_pair(row + 2 * group * kLanes, &result.low[0], &result.low[1]);
    load_bf16_pair(row + kPanel + 2 * group * kLanes, &result.high[0], &result.high[1]);
    return result;
  }
  static Value repeat(uint32_t pair) {
    const uint32_t words[2] = {pair << 16, pair & 0xffff0000u};
    float values[2];
    std::memcpy(values, words, sizeof(values));
    return {set1(values[0]), set1(values[1])};
  }
  static void add_products(const Value& value, const Weights& weights, Vec (&sums)[2]) {
    sums[0] = fma(value.second, weights.low[1], fma(value.first, weights.low[0], sums[0]));
    sums[1] = fma(value.second, weights.high[1], fma(value.first, weights.high[0], sums[1]));
  }
#endif
};

struct PairProduct : ChainedProduct<PairChain, BF16> {
  static int64_t packed_row(const LinearArgs& a) { return num_runs(a) * kRunPairs; }

  // [ceil(K / kRun)][rows][kRun / 2], filled up with zeros.
  static void pack_row(const LinearArgs& a, const BF16* x, int64_t r, int64_t rows, uint32_t* out) {
    uint32_t* run = out + r * kRunPairs;
    int64_t k = 0;
    for (; k + kRun <= a.inner; k += kRun, run += rows * kRunPairs) std::memcpy(run, x + k, kRun * sizeof(BF16));
    if (k == a.inner) return;
    std::memset(run, 0, kRunPairs * sizeof(uint32_t));
    std::memcpy(run, x + k, static_cast<size_t>(a.inner - k) * sizeof(BF16));
  }
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
