// x W^T + bias with a weight of 8-bit integers, quantised in groups of 128 values of k and packed once.
//
// Each block of 64 values of a row of x is rotated (a Hadamard transform, which the weight's blocks have been through,
// too, and which leaves their product as it is); then each group of two blocks is rounded to 8 bits with a scale of its
// own. A few activations of language models are hundreds of times larger than the rest: unrotated, they take the
// resolution from their neighbours.
//
// A packed weight is a row of panels, each 32 columns wide: [K / 4][32][4] bytes, K filled up to blocks, the integers
// plus 128, four k together; then for each group its columns' scales, bfloat16 [32]. With AVX512-VNNI four bytes are
// multiplied and added at once, exactly; weights are the instruction's unsigned side and activations the signed one, so
// a group's sums begin at what takes the 128 back. Elsewhere the integers are multiplied as floats, which hold a group's
// sums exactly, too. Groups are added up in float32, in order: a row's results do not depend on the other rows of the
// batch.
#include "../int8_panels.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

using namespace int8;

// How far ahead to fetch weights: what the hardware fetches by itself stops at each page.
constexpr int64_t kAhead = 3072;

#ifdef __AVX512VNNI__

// A group of a packed row has this beside its bytes.
constexpr int64_t kInfoBytes = sizeof(float) + sizeof(int32_t);

// sums += four k of R packed rows times P panels.
template <int R, int P>
inline void add_four(const int8_t* x, const uint8_t* weight, int64_t size, Words (&sums)[R][P][2]) {
  __m512i bytes[P][2];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const uint8_t* from = weight + p * size;
    __builtin_prefetch(from + kAhead);
    __builtin_prefetch(from + kAhead + 64);
    bytes[p][0] = _mm512_loadu_si512(from);
    bytes[p][1] = _mm512_loadu_si512(from + 64);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    int32_t four;
    std::memcpy(&four, x + r * kBlock, 4);
    const __m512i value = _mm512_set1_epi32(four);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        sums[r][p][half] = (Words)_mm512_dpbusd_epi32((__m512i)sums[r][p][half], bytes[p][half], value);
      }
    }
  }
}

// totals += a group of R packed rows times P panels.
template <int R, int P>
inline void add_group(const int8_t* x, const uint8_t* weight, const uint8_t* scales, int64_t size, int blocks,
                      Ahead& ahead, Vec (&totals)[R][P][2]) {
  const int8_t* row_scales = x + blocks * R * kBlock;
  const int8_t* starts = row_scales + R * sizeof(float);
  Words sums[R][P][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    int32_t start;
    std::memcpy(&start, starts + r * sizeof(start), sizeof(start));
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sums[r][p][0] = sums[r][p][1] = Words{} + start;
  }
  for (int b = 0; b < blocks; ++b, x += R * kBlock) {
    ahead(kBlock / kRun);
    for (int k = 0; k < kBlock; k += kRun) {
#pragma GCC unroll 4
      for (int i = 0; i < kRun; i += 4, weight += kFourBytes) add_four<R, P>(x + k + i, weight, size, sums);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Vec scale = load_scales(scales + p * size, 0, half);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float row_scale;
        std::memcpy(&row_scale, row_scales + r * sizeof(row_scale), sizeof(row_scale));
        const Vec whole{_mm512_cvtepi32_ps((__m512i)sums[r][p][half])};
        totals[r][p][half] = fma(whole * scale, set1(row_scale), totals[r][p][half]);
      }
    }
  }
}

// totals = R packed rows times P panels, whatever x's dtype is.
template <int R, int P>
[[gnu::noinline]] void sum_panels(const LinearArgs& a, const int8_t* x, int64_t panel, Ahead ahead,
                                  Vec (&totals_out)[R][P][2]) {
  const int64_t size = panel_bytes(a);
  const uint8_t* weight = panel_of(a, panel);
  const uint8_t* scales = weight + num_blocks(a) * kBytesOfBlock;
  // Registers, which what is passed on cannot be.
  Vec totals[R][P][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) totals[r][p][0] = totals[r][p][1] = zero();
  }
  for (int64_t left = num_blocks(a); left > 0; left -= kGroupBlocks, scales += kScaleBytes) {
    const int blocks = static_cast<int>(least(kGroupBlocks, left));
    add_group<R, P>(x, weight, scales, size, blocks, ahead, totals);
    x += R * (blocks * kBlock + kInfoBytes);
    weight += blocks * kBytesOfBlock;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      totals_out[r][p][0] = totals[r][p][0];
      totals_out[r][p][1] = totals[r][p][1];
    }
  }
}

template <typename T>
struct Int8Product {
  using Row = T;
  using Element = int8_t;
  // Rows times the panel's two vectors, once as integers and once as floats, plus operands, fill the register file.
  static constexpr int kMaxRows = 7;
  static constexpr int64_t kPanelsAtATime = 8;

  // Few rows leave registers free: several panels at once keep enough chains in flight to hide latency.
  static constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

  static int64_t panel_size(const LinearArgs& a) { return panel_bytes(a); }
  static int64_t packed_row(const LinearArgs& a) { return num_blocks(a) * kBlock + num_groups(a) * kInfoBytes; }

  // For each group its blocks [blocks][rows][kBlock], then the rows' scales, and then where the sums of their products
  // with the weight's bytes begin.
  static void pack_row(const LinearArgs& a, const T* x, int64_t r, int64_t rows, int8_t* out) {
    rotate_row(a, x, [&](const Rotated& rotated, int block, int blocks) {
      out = pack_group(rotated, block, blocks, rows, r, out);
    });
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const int8_t* x, int64_t row, int64_t panel, Ahead ahead) {
    Vec totals[R][P][2];
    sum_panels(a, x, panel, ahead, totals);
    write_tile<T>(a, totals, row, panel, 0);
  }

 private:
  // Writes row r's part of a group that begins at a rotated block; returns where the next group begins.
  static int8_t* pack_group(const Rotated& rotated, int block, int blocks, int64_t rows, int64_t r, int8_t* to) {
    const int group = block / kGroupBlocks;
    // Sum the integers plus 128, in eight parts.
    __m512i sums = _mm512_setzero_si512();
    for (int b = 0; b < blocks; ++b, to += rows * kBlock) {
      const __m512i bytes = round_block(rotated.values[block + b], rotated.inverse(group));
      _mm512_storeu_si512(to + r * kBlock, bytes);
      sums = _mm512_add_epi64(sums, sum_shifted(bytes));
    }
    const float scale = rotated.scale(group);
    const int32_t start = start_of_sums(_mm512_reduce_add_epi64(sums), blocks);
    std::memcpy(to + r * sizeof(scale), &scale, sizeof(scale));
    std::memcpy(to + (rows + r) * sizeof(start), &start, sizeof(start));
    return to + rows * kInfoBytes;
  }

};

#else

template <typename T>
struct Int8Product {
  using Row = T;
  using Element = float;
  static constexpr int kMaxRows = kLanes == 16 ? 7 : kLanes == 8 ? 3 : 2;
  static constexpr int64_t kPanelsAtATime = 4;

  static constexpr int panels_at_once(int rows) { return 4 * rows <= kMaxRows ? 4 : 2 * rows <= kMaxRows ? 2 : 1; }

  static int64_t panel_size(const LinearArgs& a) { return panel_bytes(a); }
  static int64_t packed_row(const LinearArgs& a) { return num_blocks(a) * kBlock + num_groups(a); }

  // For each group the integers [blocks][rows][kBlock], then the rows' scales.
  static void pack_row(const LinearArgs& a, const T* x, int64_t r, int64_t rows, float* out) {
    rotate_row(a, x, [&](const Rotated& rotated, int block, int blocks) {
      const Vec inverse = rotated.inverse(block / kGroupBlocks);
      for (int b = block; b < block + blocks; ++b, out += rows * kBlock) {
        for (int i = 0; i < kBlock; i += kLanes) {
          store(out + r * kBlock + i, round(load(rotated.values[b] + i) * inverse));
        }
      }
      out[r] = rotated.scale(block / kGroupBlocks);
      out += rows;
    });
  }

  template <int R, int P>
  static void multiply(const LinearArgs& a, const float* x, int64_t row, int64_t panel, Ahead ahead) {
    const int64_t size = panel_bytes(a);
    for (int lane = 0; lane < 16; lane += kLanes) {
      const float* packed = x;
      const uint8_t* weight = panel_of(a, panel);
      const uint8_t* scales = weight + num_blocks(a) * kBytesOfBlock;
      Vec totals[R][P][2];
      for (int r = 0; r < R; ++r) {
        for (int p = 0; p < P; ++p) totals[r][p][0] = totals[r][p][1] = zero();
      }
      for (int64_t left = num_blocks(a); left > 0; left -= kGroupBlocks, scales += kScaleBytes) {
        const int blocks = static_cast<int>(least(kGroupBlocks, left));
        add_group<R, P>(packed, weight, scales, size, blocks, lane, ahead, totals);
        packed += R * (blocks * kBlock + 1);
        weight += blocks * kBytesOfBlock;
      }
      write_tile<T>(a, totals, row, panel, lane);
    }
  }

 private:
  // totals[R][P][2] += a group of R packed rows times P panels, kLanes columns of each half.
  template <int R, int P>
  static inline void add_group(const float* x, const uint8_t* weight, const uint8_t* scales, int64_t size, int blocks,
                               int lane, Ahead& ahead, Vec (&totals)[R][P][2]) {
    const float* row_scales = x + blocks * R * kBlock;
    Vec sums[R][P][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sums[r][p][0] = sums[r][p][1] = zero();
    }
    for (int b = 0; b < blocks; ++b, x += R * kBlock) {
      ahead(kBlock / kRun);
      for (int k = 0; k < kBlock; k += 4, weight += kFourBytes) {
        add_four<R, P>(x + k, weight + 4 * lane, size, sums);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Vec scale = load_scales(scales + p * size, lane, half);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          totals[r][p][half] = fma(sums[r][p][half] * scale, set1(row_scales[r]), totals[r][p][half]);
        }
      }
    }
  }

  // sums += four k of R packed rows times P panels.
  template <int R, int P>
  static inline void add_four(const float* x, const uint8_t* from, int64_t size, Vec (&sums)[R][P][2]) {
    Words words[P][2];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(from + p * size + kAhead);
      __builtin_prefetch(from + p * size + kAhead + 64);
      std::memcpy(&words[p][0], from + p * size, sizeof(Words));
      std::memcpy(&words[p][1], from + p * size + 64, sizeof(Words));
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
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec value = set1(x[r * kBlock + k]);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          sums[r][p][0] = fma(value, weight[p][0], sums[r][p][0]);
          sums[r][p][1] = fma(value, weight[p][1], sums[r][p][1]);
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
