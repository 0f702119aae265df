// Thin products of adapters, added to the rows that have them.
//
// Rows of an adapter are multiplied by tiles, whose sums are in registers: first with A, 16 ranks in the lanes, then with B,
// columns in the lanes. Each sum is one chain in the order of k, or of the ranks, however many rows share the tile.
#include "../kernels_lora.h"
#include "../scratch.h"
#include "../vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int kVectors = kRankGroup / kLanes;
constexpr int kMaxRows = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 2;
constexpr int64_t kColumns = 256;
// Values of x and out below which one thread is faster.
constexpr int64_t kLeastParallel = 16384;

// Whether two products of k are one instruction.
template <typename T>
constexpr bool kPairs = false;
#if defined(__AVX512BF16__)
template <>
constexpr bool kPairs<BF16> = true;
#endif

// Rows of an adapter: order[first] to order[first + count - 1].
struct Tile {
  int64_t adapter, first, count;
};

struct Tiles {
  explicit Tiles(const AddLoraArgs& a) : all(a.rows / kMaxRows + a.adapters + 1) {
    for (int64_t adapter = 0; adapter < a.adapters; ++adapter) {
      const int64_t end = a.starts[adapter + 1];
      for (int64_t row = a.starts[adapter]; row < end; row += kMaxRows) {
        all[count++] = {adapter, row, least(kMaxRows, end - row)};
      }
    }
  }
  int64_t count = 0;
  Scratch<Tile> all;
};

// f of a tile's number of rows as a constant.
template <int R = kMaxRows, typename F>
void with_rows(int64_t count, const F& f) {
  if (count == R) return f(Constant<R>{});
  if constexpr (R > 1) with_rows<R - 1>(count, f);
}

template <typename T>
const T* row_of(const AddLoraArgs& a, int64_t at) {
  return static_cast<const T*>(a.x) + a.order[at] * a.x_stride;
}

template <int R, typename T>
void sum_over_inner(const float* x, const T* weight, int64_t inner, Vec (&sums)[R][kVectors]) {
  for (int64_t k = 0; k < inner; ++k) {
    Vec ranks[kVectors];
    unroll<kVectors>([&](auto v) VLLM_INLINE { ranks[v] = load(weight + k * kRankGroup + v * kLanes); });
    unroll<R>([&](auto r) VLLM_INLINE {
      const Vec value = set1(x[r * inner + k]);
      unroll<kVectors>([&](auto v) VLLM_INLINE { sums[r][v] = fma(value, ranks[v], sums[r][v]); });
    });
  }
}

#if defined(__AVX512BF16__)
// Two values of k at once: their ranks lie one after the other and are brought side by side.
template <int R>
void sum_pairs(const AddLoraArgs& a, int64_t first, const BF16* weight, Vec (&sums)[R][1]) {
  static_assert(kVectors == 1);
  alignas(64) uint16_t places[32];
  for (int i = 0; i < 32; ++i) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i side_by_side = _mm512_load_si512(places);
  const BF16* x[R];
  for (int r = 0; r < R; ++r) x[r] = row_of<BF16>(a, first + r);
  int64_t k = 0;
  for (; k + 2 <= a.inner; k += 2) {
    const __m512i ranks = _mm512_permutexvar_epi16(side_by_side, _mm512_loadu_si512(weight + k * kRankGroup));
    unroll<R>([&](auto r) VLLM_INLINE {
      int32_t pair;
      std::memcpy(&pair, x[r] + k, sizeof(pair));
      sums[r][0].v = _mm512_dpbf16_ps(sums[r][0].v, (__m512bh)ranks, (__m512bh)_mm512_set1_epi32(pair));
    });
  }
  if (k == a.inner) return;
  const __m256i last = _mm256_loadu_si256((const __m256i*)(weight + k * kRankGroup));
  const __m512i ranks = _mm512_cvtepu16_epi32(last);
  unroll<R>([&](auto r) VLLM_INLINE {
    const __m512i value = _mm512_set1_epi32(x[r][k].bits);
    sums[r][0].v = _mm512_dpbf16_ps(sums[r][0].v, (__m512bh)ranks, (__m512bh)value);
  });
}
#endif

template <typename T, int R>
void shrink(const AddLoraArgs& a, const Tile& tile, int64_t group, float* wide, float* inner) {
  const T* weight = static_cast<const T*>(a.a) + (tile.adapter * a.groups + group) * a.inner * kRankGroup;
  Vec sums[R][kVectors];
  unroll<R>([&](auto r) VLLM_INLINE {
    unroll<kVectors>([&](auto v) VLLM_INLINE { sums[r][v] = zero(); });
  });
  if constexpr (kPairs<T>) {
#if defined(__AVX512BF16__)
    sum_pairs<R>(a, tile.first, weight, sums);
#endif
  } else {
    for (int r = 0; r < R; ++r) {
      const T* x = row_of<T>(a, tile.first + r);
      for (int64_t k = 0; k < a.inner; k += kLanes) {
        const int n = static_cast<int>(least(kLanes, a.inner - k));
        store_n(wide + r * a.inner + k, load_n(x + k, n), n);
      }
    }
    sum_over_inner<R>(wide, weight, a.inner, sums);
  }
  const Vec scale = set1(a.scales[tile.adapter * a.parts + group / (a.groups / a.parts)]);
  unroll<R>([&](auto r) VLLM_INLINE {
    float* out = inner + (tile.first + r) * a.groups * kRankGroup + group * kRankGroup;
    unroll<kVectors>([&](auto v) VLLM_INLINE { store(out + v * kLanes, sums[r][v] * scale); });
  });
}

// Of an embedding A has a row for each token.
template <typename T>
void look_up(const AddLoraArgs& a, const Tile& tile, int64_t group, float* inner) {
  const T* table = static_cast<const T*>(a.a) + (tile.adapter * a.groups + group) * a.inner * kRankGroup;
  const Vec scale = set1(a.scales[tile.adapter * a.parts]);
  for (int64_t at = tile.first; at < tile.first + tile.count; ++at) {
    const int64_t row = a.order[at];
    const int64_t id = a.ids_int64 != nullptr ? a.ids_int64[row] : a.ids_int32[row];
    // Of another rank's part of the vocabulary.
    const bool held = id >= 0 && id < a.inner;
    float* out = inner + at * a.groups * kRankGroup + group * kRankGroup;
    unroll<kVectors>([&](auto v) VLLM_INLINE {
      store(out + v * kLanes, held ? load(table + id * kRankGroup + v * kLanes) * scale : zero());
    });
  }
}

// Adds to n0 columns and the next n1 of R rows.
template <typename T, typename Out, int R>
void expand(const AddLoraArgs& a, const Tile& tile, const float* inner, int64_t rank, int64_t at, int n0, int n1) {
  const int64_t group_ranks = a.groups / a.parts * kRankGroup, width = a.groups * kRankGroup;
  const T* weight = static_cast<const T*>(a.b) + tile.adapter * group_ranks * a.columns + at;
  const float* values = inner + tile.first * width;
  Vec sums[R][2];
  unroll<R>([&](auto r) VLLM_INLINE { sums[r][0] = sums[r][1] = zero(); });
  const bool whole = n0 == kLanes && n1 == kLanes;
  for (int64_t j = 0; j < rank; ++j) {
    const T* row = weight + j * a.columns;
    const Vec first = whole ? load(row) : load_n(row, n0), second = whole ? load(row + kLanes) : load_n(row + n0, n1);
    unroll<R>([&](auto r) VLLM_INLINE {
      const Vec value = set1(values[r * width + j]);
      sums[r][0] = fma(value, first, sums[r][0]);
      sums[r][1] = fma(value, second, sums[r][1]);
    });
  }
  Vec gains[2] = {zero(), zero()}, shifts[2] = {zero(), zero()};
  const int64_t column = tile.adapter * a.columns + at;
  if (a.gain != nullptr) gains[0] = load_n(a.gain + column, n0), gains[1] = load_n(a.gain + column + n0, n1);
  if (a.shift != nullptr) shifts[0] = load_n(a.shift + column, n0), shifts[1] = load_n(a.shift + column + n0, n1);
  unroll<R>([&](auto r) VLLM_INLINE {
    Out* out = static_cast<Out*>(a.out) + a.order[tile.first + r] * a.out_stride + at;
    const Vec before[2] = {load_n(out, n0), load_n(out + n0, n1)};
    store_n(out, fma(before[0], gains[0], before[0] + (sums[r][0] + shifts[0])), n0);
    store_n(out + n0, fma(before[1], gains[1], before[1] + (sums[r][1] + shifts[1])), n1);
  });
}

template <typename T, typename Out>
void expand_block(const AddLoraArgs& a, const Tile& tile, const float* inner, int64_t part, int64_t from, int64_t to) {
  const int64_t rank = a.ranks[tile.adapter * a.parts + part];
  if (rank == 0 && a.gain == nullptr && a.shift == nullptr) return;
  inner += part * (a.groups / a.parts) * kRankGroup;
  with_rows(tile.count, [&](auto rows) {
    for (int64_t at = from; at < to; at += 2 * kLanes) {
      const int n0 = static_cast<int>(least(kLanes, to - at)), n1 = static_cast<int>(least(kLanes, to - at - n0));
      expand<T, Out, rows>(a, tile, inner, rank, at, n0, n1);
    }
  });
}

template <typename T, typename Out>
void add(const AddLoraArgs& a) {
  const Tiles tiles(a);
  if (tiles.count == 0) return;
  const int64_t part_groups = a.groups / a.parts, width = a.groups * kRankGroup;
  Scratch<float> inner(a.rows * width);
  int64_t blocks = 0;
  for (int64_t part = 0, from = 0; part < a.parts; from = a.ends[part++]) {
    blocks += (a.ends[part] - from + kColumns - 1) / kColumns;
  }
#pragma omp parallel if (a.rows * (a.inner + a.columns) > kLeastParallel)
  {
    Scratch<float> wide(a.x == nullptr || kPairs<T> ? 0 : kMaxRows * a.inner);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tiles.count * a.groups; ++task) {
      const Tile& tile = tiles.all[task / a.groups];
      const int64_t group = task % a.groups;
      const int64_t rank = a.ranks[tile.adapter * a.parts + group / part_groups];
      if (group % part_groups * kRankGroup >= rank) continue;
      if (a.x == nullptr) {
        look_up<T>(a, tile, group, inner.get());
        continue;
      }
      with_rows(tile.count, [&](auto rows) { shrink<T, rows>(a, tile, group, wide.get(), inner.get()); });
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < tiles.count * blocks; ++task) {
      int64_t block = task % blocks, part = 0, from = 0;
      for (; block * kColumns >= a.ends[part] - from; from = a.ends[part++]) {
        block -= (a.ends[part] - from + kColumns - 1) / kColumns;
      }
      from += block * kColumns;
      expand_block<T, Out>(a, tiles.all[task / blocks], inner.get(), part, from, least(from + kColumns, a.ends[part]));
    }
  }
}

}  // namespace

void add_lora(const AddLoraArgs& a) {
  VLLM_DISPATCH_DTYPE(a.dtype, a.out_dtype == DType::f32 ? add<scalar_t, float>(a) : add<scalar_t, scalar_t>(a));
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
