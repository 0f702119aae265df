// How many floats exceed each of up to 31 thresholds, by a search instead of a comparison a threshold.
//
// The thresholds are the nodes of a binary tree, in order. A vector of floats descends it one level at a time: look up
// each lane's node, compare, note the side. Each lane ends with a code of its path, of which byte shuffles make one bit
// a threshold, and the bits of many floats are added up in planes: the lowest bit of every count, the next, and so on.
// For 20 thresholds that takes 1.2 instructions a vector and threshold, where comparing and adding take 2.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Floats that are searched for together.
constexpr int64_t kBlock = 512;

#if defined(__AVX512F__)

// A code's lowest `bits` <= 4 bits, first to last.
constexpr int reversed(int code, int bits) {
  constexpr uint8_t kReversed[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
  return kReversed[code] >> (4 - bits);
}

// By path through `bits` levels: a bit for each threshold passed, in two bytes, and one for the place after them, in two
// more.
struct PathFlags {
  alignas(16) uint8_t bytes[4][16] = {};

  constexpr explicit PathFlags(int bits) {
    for (int code = 0; code < 1 << bits; ++code) {
      const int passed = reversed(code, bits), words[2] = {(1 << passed) - 1, 1 << passed};
      for (int byte = 0; byte < 4; ++byte) bytes[byte][code] = static_cast<uint8_t>(words[byte / 2] >> byte % 2 * 8);
    }
  }
};
constexpr PathFlags kThreeLevels(3), kFourLevels(4);

class ThresholdTree {
 public:
  static constexpr int64_t kMost = 31;

  // Begins to count what exceeds `num` <= kMost descending thresholds, none of them NaN.
  void plant(const float* thresholds, int64_t num) {
    num_ = static_cast<int>(num);
    depth_ = num > 15 ? 5 : num > 7 ? 4 : 3;
    num_bytes_ = depth_ < 5 ? depth_ - 2 : num > 23 ? 4 : 3;
    num_blocks_ = 0;
    is_used_ = false;
    if (num < kWorthwhile[0]) return;
    float nodes[1 << 5];
    for (float& node : nodes) node = __builtin_inff();
    for (int i = 0; i < num_; ++i) nodes[place(i)] = thresholds[num_ - 1 - i];
    for (int level = 0; level < depth_; ++level) {
      for (int code = 0; code < 1 << level; ++code) {
        tables_[level][code] = nodes[(2 * reversed(code, level) + 1) << (depth_ - 1 - level)];
      }
    }
    const PathFlags& flags = depth_ == 3 ? kThreeLevels : kFourLevels;
    for (int byte = 0; byte < num_bytes_; ++byte) {
      _mm512_store_si512(flags_[byte], _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)flags.bytes[byte])));
    }
    std::memset(totals_, 0, sizeof(totals_));
    std::memset(planes_, 0, sizeof(planes_));
  }

  // Whether a block's search is cheaper than comparing it with `num` of the thresholds.
  bool pays(int64_t num) const { return num >= kWorthwhile[depth_ - 3]; }

  // Counts among kBlock floats; NaN exceeds nothing.
  void add_block(const float* x) {
    if (depth_ == 3) {
      add<3, 1>(x);
    } else if (depth_ == 4) {
      add<4, 2>(x);
    } else if (num_bytes_ == 3) {
      add<5, 3>(x);
    } else {
      add<5, 4>(x);
    }
  }

  // counts[w] += how many floats exceeded thresholds[w].
  void finish(int32_t* counts) {
    if (!is_used_) return;
    drain();
    for (int i = 0; i < num_; ++i) {
      const int at = place(i);
      int32_t count = 0;
      if (depth_ < 5) {
        count = totals_[at - 1];
      } else if (at % 2 == 0) {
        count = totals_[at / 2 - 1];
      } else {
        // A leaf: its own floats, and those that passed the inner node behind it.
        count = totals_[16 + at / 2] + (at < 31 ? totals_[at / 2] : 0);
      }
      counts[num_ - 1 - i] += count;
    }
  }

 private:
  // From so many thresholds on (depths 3, 4, 5), measured.
  static constexpr int64_t kWorthwhile[] = {6, 9, 12};
  static constexpr int kPlanes = 12;
  // Groups of 64 floats.
  static constexpr int kGroups = 4;
  // The planes hold so many blocks with 8 groups of 64 floats each.
  static constexpr int64_t kMostBlocks = (1 << kPlanes) / 8 - 1;

  // Where the i-th lowest threshold stands in a tree in order, from 1. The deepest level of the largest tree has as
  // few nodes as possible, because they need bits of their own.
  int place(int i) const {
    const int leaves = num_ - 15;
    return depth_ < 5 || i < 2 * leaves ? i + 1 : 2 * (i - leaves + 1);
  }

  // Adds `a` and `b` to a plane of bits; what it cannot hold has the next plane's weight.
  static __m512i carry(__m512i* plane, __m512i a, __m512i b) {
    const __m512i result = _mm512_ternarylogic_epi64(*plane, a, b, 0xe8);
    *plane = _mm512_ternarylogic_epi64(*plane, a, b, 0x96);
    return result;
  }

  // Adds eight vectors to three planes; returns what has eight times their weight.
  static __m512i add_eight(__m512i* planes, const __m512i* bits) {
    __m512i fours[2];
    for (int half = 0; half < 2; ++half) {
      const __m512i* in = bits + 4 * half;
      const __m512i a = carry(planes, in[0], in[1]);
      const __m512i b = carry(planes, in[2], in[3]);
      fours[half] = carry(planes + 1, a, b);
    }
    return carry(planes + 2, fours[0], fours[1]);
  }

  // The paths of kGroups times 64 floats, one a byte: bit l is the side taken at level l; at level 4, bit 7 is set for
  // the lower one. Many vectors descend in step, because each waits long for its own last comparison.
  template <int kDepth>
  void paths(const float* x, __m512i (&result)[kGroups]) const {
    constexpr int kVectors = 4 * kGroups;
    __m512i code[kVectors];
    const __m512 top = _mm512_set1_ps(tables_[0][0]);
    for (int i = 0; i < kVectors; ++i) {
      const __mmask16 side = _mm512_cmp_ps_mask(top, _mm512_loadu_ps(x + 16 * i), _CMP_LT_OQ);
      code[i] = _mm512_maskz_mov_epi32(side, _mm512_set1_epi32(1));
    }
#pragma GCC unroll 4
    for (int level = 1; level < kDepth; ++level) {
      const __m512 table = _mm512_load_ps(tables_[level]);
      const __m512i bit = _mm512_set1_epi32(level < 4 ? 1 << level : 128);
      // So that they are loaded again, which is free, instead of taking registers.
      asm("" : "+r"(x));
      for (int i = 0; i < kVectors; ++i) {
        const __m512 node = _mm512_permutexvar_ps(code[i], table), value = _mm512_loadu_ps(x + 16 * i);
        const __mmask16 side = level < 4 ? _mm512_cmp_ps_mask(node, value, _CMP_LT_OQ)
                                         : _mm512_cmp_ps_mask(node, value, _CMP_NLT_UQ);
        code[i] = _mm512_mask_add_epi32(code[i], side, code[i], bit);
      }
    }
    for (int group = 0; group < kGroups; ++group) {
      const __m512i* own = code + 4 * group;
      const __m512i low = _mm512_or_si512(own[0], _mm512_slli_epi32(own[1], 8));
      const __m512i high = _mm512_or_si512(own[2], _mm512_slli_epi32(own[3], 8));
      result[group] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
  }

  template <int kDepth, int kBytes>
  void add(const float* x) {
    __m512i bits[kBytes][8];
    for (int first = 0; first < 8; first += kGroups) {
      __m512i codes[kGroups];
      paths<kDepth>(x + first * 64, codes);
      for (int group = 0; group < kGroups; ++group) {
        // A shuffle makes 0 of a byte whose highest bit is set: only the leaves' bits are to see it.
        const __m512i inner = kDepth > 4 ? _mm512_and_si512(codes[group], _mm512_set1_epi8(15)) : codes[group];
        for (int byte = 0; byte < kBytes; ++byte) {
          bits[byte][first + group] =
              _mm512_shuffle_epi8(_mm512_load_si512(flags_[byte]), byte < 2 ? inner : codes[group]);
        }
      }
    }
    is_used_ = true;
    const int64_t block = num_blocks_++;
    for (int byte = 0; byte < kBytes; ++byte) {
      __m512i* planes = planes_[byte];
      waiting_[0][byte][block & 7] = add_eight(planes, bits[byte]);
      if ((block & 7) != 7) continue;
      waiting_[1][byte][block >> 3 & 7] = add_eight(planes + 3, waiting_[0][byte]);
      if ((block & 63) == 63) waiting_[2][byte][block >> 6 & 7] = add_eight(planes + 6, waiting_[1][byte]);
    }
    if (num_blocks_ == kMostBlocks) drain();
  }

  // Moves what the planes hold into the totals.
  void drain() {
    for (int byte = 0; byte < num_bytes_; ++byte) {
      __m512i* planes = planes_[byte];
      for (int level = 0; level < 3; ++level) {
        __m512i* waiting = waiting_[level][byte];
        int64_t num = num_blocks_ >> (3 * level) & 7;
        // The level below had not handed this on until now.
        if (level > 0 && (num_blocks_ & ((int64_t{1} << (3 * level)) - 1)) != 0) ++num;
        for (; num < 8; ++num) waiting[num] = _mm512_setzero_si512();
        const __m512i rest = add_eight(planes + 3 * (level + 1), waiting);
        if (level < 2) waiting_[level + 1][byte][num_blocks_ >> (3 * (level + 1)) & 7] = rest;
      }
      for (int plane = 0; plane < kPlanes && num_blocks_ * 8 >> plane != 0; ++plane) {
        for (int bit = 0; bit < 8; ++bit) {
          const __mmask64 set = _mm512_test_epi8_mask(planes[plane], _mm512_set1_epi8(static_cast<char>(1 << bit)));
          totals_[byte * 8 + bit] += static_cast<int32_t>(__builtin_popcountll(set)) << plane;
        }
        planes[plane] = _mm512_setzero_si512();
      }
    }
    num_blocks_ = 0;
  }

  alignas(64) float tables_[5][16];   // thresholds by level and path
  alignas(64) uint8_t flags_[4][64];  // by path: of inner thresholds, two bytes; of the deepest level's, two more
  __m512i planes_[4][kPlanes];
  __m512i waiting_[3][4][8];  // what blocks, or eight or 64 of them, have left over
  int32_t totals_[32];
  int64_t num_blocks_;
  int num_, depth_, num_bytes_;
  bool is_used_;
};

#else

// Without masks and wide shuffles a search is no cheaper.
struct ThresholdTree {
  static constexpr int64_t kMost = 31;
  void plant(const float*, int64_t) {}
  bool pays(int64_t) const { return false; }
  void add_block(const float*) {}
  void finish(int32_t*) {}
};

#endif

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
