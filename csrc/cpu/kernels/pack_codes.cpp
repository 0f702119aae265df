// Codes from blocks of bytes into panels: 32 rows' codes of a few blocks are unpacked to bytes in the first-level cache, 8 at
// a time in a 64-bit word, and written in a panel's order. Sizes are whole words: the binding has checked it.
#include <algorithm>
#include <cstring>

#include "../kernels.h"

// Fast on all processors with AVX-512, but not on all with AVX2.
#if defined(__AVX512F__)
#include <immintrin.h>
#define VLLM_WITH_PEXT __attribute__((target("bmi2")))
#else
#define VLLM_WITH_PEXT
#endif

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int kRows = 32, kWord = 8;
// Bytes of a row that are unpacked at a time, if a block is not larger.
constexpr int64_t kChunk = 512;
constexpr uint64_t kOnes = 0x0101010101010101;

template <typename T>
uint64_t load_word(const uint8_t* p) {
  T word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// The byte of each of 8 codes, of which a word holds kPerByte in a byte; other bits are anything.
template <int kPerByte>
uint64_t spread(const uint8_t* p) {
  if constexpr (kPerByte == 1) return load_word<uint64_t>(p);
  if constexpr (kPerByte == 2) {
    uint64_t w = load_word<uint32_t>(p);
    w = (w | w << 16) & 0x0000ffff0000ffff;
    w = (w | w << 8) & 0x00ff00ff00ff00ff;
    return (w | w << 4) & (kOnes * 0x0f);
  }
  if constexpr (kPerByte == 4) {
    uint64_t w = load_word<uint16_t>(p);
    w = (w | w << 24) & 0x000000ff000000ff;
    w = (w | w << 12) & 0x000f000f000f000f;
    return (w | w << 6) & (kOnes * 0x03);
  }
  // Byte k keeps bit k, which then carries into the highest one.
  const uint64_t w = (*p * kOnes) & 0x8040201008040201;
  return ((w + kOnes * 0x7f) >> 7) & kOnes;
}

// One field of `blocks` blocks, of kCount codes if it is given.
template <int kPerByte, int kCount = 0>
void add_field(const PackCodesArgs& a, const BitField& f, int64_t blocks, const uint8_t* __restrict data,
               uint8_t* __restrict codes) {
  const uint64_t mask = kOnes * ((1u << f.width) - 1);
  const int64_t count = kCount ? kCount : f.count, num_bytes = a.num_bytes, num_codes = a.num_codes;
  const int shift = static_cast<int>(f.shift), to = static_cast<int>(f.to);
  data += f.at;
  codes += f.first;
  for (int64_t block = 0; block < blocks; ++block, data += num_bytes, codes += num_codes) {
    for (int64_t i = 0; i < count; i += kWord) {
      uint64_t word = load_word<uint64_t>(codes + i);
      word |= ((spread<kPerByte>(data + i / kPerByte) >> shift) & mask) << to;
      std::memcpy(codes + i, &word, sizeof(word));
    }
  }
}

void unpack_blocks(const PackCodesArgs& a, int64_t blocks, const uint8_t* data, uint8_t* codes) {
  std::memset(codes, a.flipped, blocks * a.num_codes);
  for (int64_t i = 0; i < a.num_fields; ++i) {
    const BitField& f = a.fields[i];
    switch (f.per_byte) {
      case 1:
        // Usual sizes take no inner loop.
        if (f.count == 16) {
          add_field<1, 16>(a, f, blocks, data, codes);
        } else if (f.count == 32) {
          add_field<1, 32>(a, f, blocks, data, codes);
        } else {
          add_field<1>(a, f, blocks, data, codes);
        }
        break;
      case 2:
        add_field<2>(a, f, blocks, data, codes);
        break;
      case 4:
        add_field<4>(a, f, blocks, data, codes);
        break;
      default:
        add_field<8>(a, f, blocks, data, codes);
    }
  }
}

// kBits of each of a word's 8 bytes, side by side, the first ones lowest.
template <int kBits>
VLLM_WITH_PEXT inline uint64_t gather_bits(uint64_t w) {
#if defined(__AVX512F__)
  return _pext_u64(w, kOnes * ((1u << kBits) - 1));
#endif
  if constexpr (kBits == 4) {
    w &= kOnes * 0x0f;
    w = (w | w >> 4) & 0x00ff00ff00ff00ff;
    w = (w | w >> 8) & 0x0000ffff0000ffff;
    return (w | w >> 16) & 0xffffffff;
  }
  if constexpr (kBits == 2) {
    w &= kOnes * 0x03;
    w = (w | w >> 6) & 0x000f000f000f000f;
    w = (w | w >> 12) & 0x000000ff000000ff;
    return (w | w >> 24) & 0xffff;
  }
  return ((w & kOnes) * 0x0102040810204080) >> 56;
}

// One plane of a unit, whose codes are `stride` bytes apart from column to column; see quantized_panels.h.
template <int kBits>
VLLM_WITH_PEXT uint8_t* put_plane(const uint8_t* codes, int64_t stride, int below, uint8_t* out) {
  for (int c = 0; c < kRows; ++c) {
    const uint64_t bits = gather_bits<kBits>(load_word<uint64_t>(codes + c * stride) >> below);
    // Words of 4 bits stand by halves of the columns, smaller ones of columns c and c + 16 side by side.
    const int place = kBits == 4 ? c : 2 * (c % 16) + c / 16;
    std::memcpy(out + place * kBits, &bits, kBits);
  }
  return out + kRows * kBits;
}

uint8_t* put_bytes(const uint8_t* codes, int64_t stride, uint8_t* out) {
  for (int c = 0; c < kRows; ++c) {
    std::memcpy(out + 4 * c, codes + c * stride, 4);
    std::memcpy(out + 4 * (kRows + c), codes + c * stride + 4, 4);
  }
  return out + kRows * kWord;
}

uint8_t* put_unit(int64_t bits, const uint8_t* codes, int64_t stride, uint8_t* out) {
  switch (bits) {
    case 2:
      return put_plane<2>(codes, stride, 0, out);
    case 3:
      return put_plane<1>(codes, stride, 2, put_plane<2>(codes, stride, 0, out));
    case 4:
      return put_plane<4>(codes, stride, 0, out);
    case 5:
      return put_plane<1>(codes, stride, 4, put_plane<4>(codes, stride, 0, out));
    case 6:
      return put_plane<2>(codes, stride, 4, put_plane<4>(codes, stride, 0, out));
    default:
      return put_bytes(codes, stride, out);
  }
}

void pack_panel(const PackCodesArgs& a, int64_t panel) {
  thread_local uint8_t codes[kRows * std::max(kChunk, kMaxBlockCodes)];
  const int64_t together = std::max<int64_t>(1, kChunk / a.num_codes), stride = together * a.num_codes;
  uint8_t* out = a.panels + panel * a.panel_bytes;
  for (int64_t block = 0; block < a.num_blocks; block += together) {
    const int64_t count = std::min(together, a.num_blocks - block);
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t row = panel * kRows + r;
      if (row >= a.rows) {
        std::memset(codes + r * stride, 0, stride);
        continue;
      }
      const uint8_t* data = reinterpret_cast<const uint8_t*>(a.addresses[row]) + block * a.num_bytes;
      // So many rows at once are too many for the processor to foresee.
      for (int64_t i = 0; i < count * a.num_bytes; i += 64) __builtin_prefetch(data + count * a.num_bytes + i);
      unpack_blocks(a, count, data, codes + r * stride);
    }
    for (int64_t k = 0; k < count * a.num_codes; k += kWord) out = put_unit(a.bits, codes + k, stride, out);
  }
}

}  // namespace

void pack_codes(const PackCodesArgs& a) {
  const int64_t panels = (a.rows + kRows - 1) / kRows;
  for (int64_t panel = 0; panel < panels; ++panel) pack_panel(a, panel);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
