// Matrix tiles: the instructions of AMX or, in a library for tests (VLLM_EMULATED), scalar arithmetic with the same results to
// the bit, for CPUs that lack them. Kernels use no such instruction but through these, so that what the emulation computes
// is what they compute.
//
// A thread has eight tiles of up to 16 rows of 64 bytes. A product takes a left tile [rows][k], and a right one [k /
// n][columns][n] whose rows hold n neighbours of k of each column, as many as 4 bytes do; into a tile [rows][columns] of
// float32 or int32.
//
// Include only from kernels/*.cpp.
#pragma once

#include <cstring>

#include "vec.h"

#if defined(__AMX_TILE__) || defined(VLLM_EMULATED)
#define VLLM_HAS_TILES

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;
// Values of k that a tile of bfloat16 holds.
constexpr int kTileInner = 32;

// The shapes of a thread's tiles, as the CPU reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t bytes = kTileBytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

#if !defined(VLLM_EMULATED)
// Sets the shapes of this thread's tiles, and the tiles to zero.
inline void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
// After a thread's last use, so that the system need not keep its tiles.
inline void release_tiles() { asm volatile("tilerelease"); }

template <int tile>
[[gnu::always_inline]] inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
// Rows are `stride` bytes apart.
template <int tile>
[[gnu::always_inline]] inline void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
[[gnu::always_inline]] inline void store_tile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
}
// sums += left right of bfloat16. For each 32 of k those of even and of odd k are two chains of multiply-adds in float32, in
// order, whose sum is added; numbers below the smallest normal one count as zero.
template <int sums, int left, int right>
[[gnu::always_inline]] inline void add_bf16_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
// sums += left right of signed bytes in int32.
template <int sums, int left, int right>
[[gnu::always_inline]] inline void add_int8_products() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
// The same of signed bytes on the left and unsigned ones on the right.
template <int sums, int left, int right>
[[gnu::always_inline]] inline void add_int8_by_uint8_products() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
#else
struct EmulatedTiles {
  TileShapes shapes;
  bool configured = false;
  alignas(64) uint8_t tiles[8][kTileRows][kTileBytes];

  // The CPU would refuse what does not hold.
  void check(bool holds) const {
    if (!configured || !holds) __builtin_trap();
  }
  void check_product(int sums, int left, int right) const {
    check(shapes.rows[sums] == shapes.rows[left] && shapes.row_bytes[sums] == shapes.row_bytes[right] &&
          shapes.row_bytes[left] == 4 * shapes.rows[right] && shapes.rows[sums] > 0 && shapes.row_bytes[sums] > 0 &&
          sums != left && sums != right && left != right);
  }
};

// One a level: what it emulates it alone has.
inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void configure_tiles(const TileShapes& shapes) {
  EmulatedTiles& e = emulated_tiles();
  e.shapes = shapes;
  e.configured = true;
  for (int tile = 0; tile < 8; ++tile) e.check(shapes.rows[tile] <= kTileRows && shapes.row_bytes[tile] <= kTileBytes);
  std::memset(e.tiles, 0, sizeof(e.tiles));
}
inline void release_tiles() { emulated_tiles().configured = false; }

template <int tile>
inline void zero_tile() {
  emulated_tiles().check(true);
  std::memset(emulated_tiles().tiles[tile], 0, sizeof(emulated_tiles().tiles[tile]));
}
template <int tile>
[[gnu::noinline]] void load_tile(const void* rows, int64_t stride) {
  EmulatedTiles& e = emulated_tiles();
  e.check(e.shapes.rows[tile] > 0);
  std::memset(e.tiles[tile], 0, sizeof(e.tiles[tile]));
  for (int r = 0; r < e.shapes.rows[tile]; ++r) {
    std::memcpy(e.tiles[tile][r], static_cast<const char*>(rows) + r * stride, e.shapes.row_bytes[tile]);
  }
}
template <int tile>
[[gnu::noinline]] void store_tile(void* rows, int64_t stride) {
  EmulatedTiles& e = emulated_tiles();
  e.check(e.shapes.rows[tile] > 0);
  for (int r = 0; r < e.shapes.rows[tile]; ++r) {
    std::memcpy(static_cast<char*>(rows) + r * stride, e.tiles[tile][r], e.shapes.row_bytes[tile]);
  }
}

// Zero in place of numbers below the smallest normal one.
inline __m512 flush(__m512 x) {
  const __mmask16 tiny = _mm512_fpclass_ps_mask(x, 0x20);
  return _mm512_mask_and_ps(x, tiny, x, _mm512_castsi512_ps(_mm512_set1_epi32(INT32_MIN)));
}

template <int sums, int left, int right>
[[gnu::noinline]] void add_bf16_products() {
  EmulatedTiles& e = emulated_tiles();
  e.check_product(sums, left, right);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int r = 0; r < e.shapes.rows[sums]; ++r) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < e.shapes.rows[right]; ++k) {
      uint32_t pair;
      std::memcpy(&pair, e.tiles[left][r] + 4 * k, sizeof(pair));
      const __m512i pairs = _mm512_load_si512(e.tiles[right][k]), value = _mm512_set1_epi32(static_cast<int>(pair));
      even = flush(_mm512_fmadd_ps(flush(_mm512_castsi512_ps(_mm512_slli_epi32(value, 16))),
                                   flush(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))), even));
      odd = flush(_mm512_fmadd_ps(flush(_mm512_castsi512_ps(_mm512_and_si512(value, upper))),
                                  flush(_mm512_castsi512_ps(_mm512_and_si512(pairs, upper))), odd));
    }
    float* row = reinterpret_cast<float*>(e.tiles[sums][r]);
    _mm512_store_ps(row, flush(_mm512_add_ps(flush(_mm512_load_ps(row)), flush(_mm512_add_ps(even, odd)))));
  }
}

// Byte i of each word, as an integer.
template <int i, bool kSigned>
inline __m512i byte_of_words(__m512i words) {
  const __m512i upper = _mm512_slli_epi32(words, 24 - 8 * i);
  return kSigned ? _mm512_srai_epi32(upper, 24) : _mm512_srli_epi32(upper, 24);
}

template <int sums, int left, int right, bool kSigned>
inline void add_byte_products() {
  EmulatedTiles& e = emulated_tiles();
  e.check_product(sums, left, right);
  for (int r = 0; r < e.shapes.rows[sums]; ++r) {
    __m512i total = _mm512_load_si512(e.tiles[sums][r]);
    for (int k = 0; k < e.shapes.rows[right]; ++k) {
      const __m512i bytes = _mm512_load_si512(e.tiles[right][k]);
      const int8_t* four = reinterpret_cast<const int8_t*>(e.tiles[left][r] + 4 * k);
      unroll<4>([&](auto i) VLLM_INLINE {
        const __m512i product = _mm512_mullo_epi32(_mm512_set1_epi32(four[i]), byte_of_words<i, kSigned>(bytes));
        total = _mm512_add_epi32(total, product);
      });
    }
    _mm512_store_si512(e.tiles[sums][r], total);
  }
}

template <int sums, int left, int right>
[[gnu::noinline]] void add_int8_products() {
  add_byte_products<sums, left, right, true>();
}
template <int sums, int left, int right>
[[gnu::noinline]] void add_int8_by_uint8_products() {
  add_byte_products<sums, left, right, false>();
}
#endif

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
