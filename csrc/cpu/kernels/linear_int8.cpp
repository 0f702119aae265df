// x W^T + bias with a weight of 8-bit integers and a scale a column, packed once.
//
// Each row of x becomes 16-bit integers with a scale of its own, and is multiplied as two balanced digits of 8 bits
// (256 high + low, both in [-128, 127]): with 8 bits alone the few huge activations of language models take the
// resolution from all others. The bytes of the weight are streamed once for both digits, so where memory is the limit
// the second one is free.
//
// A packed weight is a row of panels, each 32 columns wide and in groups of four k: [K / 4][32][4], K filled up to 16,
// each byte the weight plus 128. With AVX512-VNNI four bytes are multiplied and added at once, exactly; weights are
// the instruction's unsigned side and activations the signed one, so one number a row takes the 128 back in all
// columns. Elsewhere the integers are multiplied as floats, in chains, in order. Either way a row's results do not
// depend on the other rows of the batch.
#include "../gemm.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// Bytes of four k in a panel.
constexpr int64_t kGroupBytes = kPanel * 4;
// How far ahead to fetch weights: what the hardware fetches by itself stops at each page.
constexpr int64_t kAhead = 3072;

// As __m512i, an accumulator would be converted in and out of each intrinsic, and spill.
typedef int32_t Words __attribute__((vector_size(4 * kLanes)));

inline int64_t panel_bytes(const LinearArgs& a) { return num_runs(a) * kRun * kPanel; }
inline const uint8_t* panel_of(const LinearArgs& a, int64_t panel) {
  return static_cast<const uint8_t*>(a.weight) + panel * panel_bytes(a);
}

// What a row's values are multiplied with to become integers, and what undoes it: NaN if any value is not finite.
template <typename T>
float measure_row(const T* x, int64_t inner, float* scale) {
  // 127 * 256 + 127: the greatest number of two balanced digits.
  constexpr float kGreatest = 32639.0f;
  // Below this a row counts as zero: kGreatest over it would overflow.
  constexpr float kLeast = 1e-30f;
  Vec greatest = zero(), poison = zero();
  for (int64_t k = 0; k < inner; k += kLanes) {
    const Vec value = load_n(x + k, static_cast<int>(least(kLanes, inner - k)));
    greatest = max(greatest, max(value, zero() - value));
    poison = poison + value * zero();
  }
  const float absmax = reduce_max(greatest);
  *scale = (absmax > kLeast ? absmax / kGreatest : 0.0f) + reduce_sum(poison);
  return absmax > kLeast ? kGreatest / absmax : 0.0f;
}

// Scales a row's sums in kLanes columns of a panel's first half and of its second, and writes their results.
template <typename T>
inline void finish(const LinearArgs& a, Vec low, Vec high, float row_scale, int64_t row, int64_t panel, int64_t lane) {
  const float* scales = a.scales + panel * kPanel + lane;
  write_sums<T>(a, low * set1(row_scale) * load(scales), high * set1(row_scale) * load(scales + 16), row, panel, lane);
}

#ifdef __AVX512VNNI__

template <typename T>
struct Int8Product {
  using Element = int8_t;
  // Rows times two digits times the panel's two vectors, plus operands, fill the register file.
  static constexpr int kMaxRows = 7;
  static constexpr int64_t kPanelsAtATime = 4;

  // Few rows leave registers free: several panels at once keep enough chains in flight to hide latency.
  static constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

  static int64_t panel_size(const LinearArgs& a) { return panel_bytes(a); }
  static int64_t packed_row(const LinearArgs& a) { return num_runs(a) * 2 * kRun + sizeof(RowInfo); }

  // As [run][rows][digit][kRun], then each row's RowInfo.
  static void pack_rows(const LinearArgs& a, int64_t first, int64_t rows, int8_t* out) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* x = static_cast<const T*>(a.x) + (first + r) * a.x_stride;
      RowInfo info;
      const Vec inverse = set1(measure_row(x, a.inner, &info.scale));
      __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
      int8_t* digits = out + r * 2 * kRun;
      for (int64_t k = 0; k < a.inner; k += kRun, digits += rows * 2 * kRun) {
        const Vec value = load_n(x + k, static_cast<int>(least(kRun, a.inner - k)));
        const __m512i whole = _mm512_cvtps_epi32((value * inverse).v);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
        high_sum = _mm512_add_epi32(high_sum, high);
        low_sum = _mm512_add_epi32(low_sum, low);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digits), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digits + kRun), _mm512_cvtepi32_epi8(low));
      }
      info.high_offset = 128 * _mm512_reduce_add_epi32(high_sum);
      info.low_offset = 128 * _mm512_reduce_add_epi32(low_sum);
      std::memcpy(out + num_runs(a) * 2 * kRun * rows + r * sizeof(RowInfo), &info, sizeof(RowInfo));
    }
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const int8_t* x, int64_t row, int64_t panel, Ahead ahead) {
    Words totals[2 * R][P][2];
    x = add_products<R, P>(a, x, panel_of(a, panel), ahead, totals);
    // Unrolled like the products: a total with an index known only at run time would live in memory all along.
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      RowInfo info;
      std::memcpy(&info, x + r * sizeof(RowInfo), sizeof(RowInfo));
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        Vec sums[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const Vec high{_mm512_cvtepi32_ps((__m512i)(totals[2 * r][p][half] - info.high_offset))};
          const Vec low{_mm512_cvtepi32_ps((__m512i)(totals[2 * r + 1][p][half] - info.low_offset))};
          sums[half] = fma(set1(256.0f), high, low);
        }
        finish<T>(a, sums[0], sums[1], info.scale, row + r, panel + p, 0);
      }
    }
  }

 private:
  struct RowInfo {
    float scale;
    // 128 times the sums of the row's digits.
    int32_t high_offset, low_offset;
  };

  // totals[2 R][P][2] = the digits of R packed rows times P panels. Returns where the rows' RowInfos begin.
  template <int R, int P>
  static inline const int8_t* add_products(const LinearArgs& a, const int8_t* x, const uint8_t* panel, Ahead ahead,
                                           Words (&totals)[2 * R][P][2]) {
#pragma GCC unroll 16
    for (int digit = 0; digit < 2 * R; ++digit) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) totals[digit][p][0] = totals[digit][p][1] = Words{};
    }
    const int64_t runs = num_runs(a), size = panel_bytes(a);
    for (int64_t run = 0; run < runs; ++run, x += R * 2 * kRun) {
      ahead();
#pragma GCC unroll 4
      for (int group = 0; group < kRun; group += 4, panel += kGroupBytes) {
        __m512i weight[P][2];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          const uint8_t* from = panel + p * size;
          __builtin_prefetch(from + kAhead);
          __builtin_prefetch(from + kAhead + 64);
          weight[p][0] = _mm512_loadu_si512(from);
          weight[p][1] = _mm512_loadu_si512(from + 64);
        }
#pragma GCC unroll 16
        for (int digit = 0; digit < 2 * R; ++digit) {
          int32_t four;
          std::memcpy(&four, x + digit * kRun + group, 4);
          const __m512i value = _mm512_set1_epi32(four);
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
              Words& total = totals[digit][p][half];
              total = (Words)_mm512_dpbusd_epi32((__m512i)total, weight[p][half], value);
            }
          }
        }
      }
    }
    return x;
  }
};

#else

template <typename T>
struct Int8Product {
  using Element = float;
  static constexpr int kMaxRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;
  static constexpr int64_t kPanelsAtATime = 4;

  static constexpr int panels_at_once(int rows) { return 4 * rows <= kMaxRows ? 4 : 2 * rows <= kMaxRows ? 2 : 1; }

  static int64_t panel_size(const LinearArgs& a) { return panel_bytes(a); }
  static int64_t packed_row(const LinearArgs& a) { return num_runs(a) * kRun + 1; }

  // The integers as [run][rows][kRun], then the rows' scales.
  static void pack_rows(const LinearArgs& a, int64_t first, int64_t rows, float* out) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* x = static_cast<const T*>(a.x) + (first + r) * a.x_stride;
      const Vec inverse = set1(measure_row(x, a.inner, out + num_runs(a) * kRun * rows + r));
      float* run = out + r * kRun;
      for (int64_t k = 0; k < a.inner; k += kRun, run += rows * kRun) {
        for (int i = 0; i < kRun; i += kLanes) {
          const int64_t left = a.inner - k - i;
          const Vec value = left > 0 ? load_n(x + k + i, static_cast<int>(least(kLanes, left))) : zero();
          store(run + i, round(value * inverse));
        }
      }
    }
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const float* x, int64_t row, int64_t panel, Ahead ahead) {
    const float* row_scales = x + num_runs(a) * kRun * R;
    for (int lane = 0; lane < 16; lane += kLanes) {
      Vec totals[R][P][2];
      add_chain<R, P>(a, x, panel_of(a, panel) + 4 * lane, least(kChain, num_runs(a)), ahead, totals);
      for (int64_t run = kChain; run < num_runs(a); run += kChain) {
        Vec sums[R][P][2];
        add_chain<R, P>(a, x + run * R * kRun, panel_of(a, panel) + run * kRun * kPanel + 4 * lane,
                        least(kChain, num_runs(a) - run), ahead, sums);
        add_to(totals, sums);
      }
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) {
          finish<T>(a, totals[r][p][0], totals[r][p][1], row_scales[r], row + r, panel + p, lane);
        }
      }
    }
  }

 private:
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  static constexpr int64_t kChain = 256 / kRun;

  // sums[R][P][2] = R packed rows times P panels over `runs` runs, kLanes columns of each half.
  template <int R, int P>
  static inline void add_chain(const LinearArgs& a, const float* x, const uint8_t* panel, int64_t runs, Ahead& ahead,
                               Vec (&sums)[R][P][2]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sums[r][p][0] = sums[r][p][1] = zero();
    }
    const int64_t size = panel_bytes(a);
    for (int64_t run = 0; run < runs; ++run, x += R * kRun) {
      ahead();
      for (int group = 0; group < kRun; group += 4, panel += kGroupBytes) {
        Words words[P][2];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          __builtin_prefetch(panel + p * size + kAhead);
          __builtin_prefetch(panel + p * size + kAhead + 64);
          std::memcpy(&words[p][0], panel + p * size, sizeof(Words));
          std::memcpy(&words[p][1], panel + p * size + 64, sizeof(Words));
          // In two's complement, taking 128 from a byte is flipping its sign bit.
          words[p][0] ^= static_cast<int32_t>(0x80808080u);
          words[p][1] ^= static_cast<int32_t>(0x80808080u);
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          Vec weight[P][2];
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
              const Words value = (words[p][half] << (24 - 8 * k)) >> 24;
              weight[p][half].v = (decltype(Vec::v))__builtin_convertvector(value, Floats);
            }
          }
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            const Vec value = set1(x[r * kRun + group + k]);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
              sums[r][p][0] = fma(value, weight[p][0], sums[r][p][0]);
              sums[r][p][1] = fma(value, weight[p][1], sums[r][p][1]);
            }
          }
        }
      }
    }
  }
};

#endif

}  // namespace

void linear_int8(const LinearArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, Gemm<Int8Product<scalar_t>>::run(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
