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

// The dtype between the products: bfloat16 with such instructions is rounded there, too.
template <typename T>
struct InnerOf {
  using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct InnerOf<BF16> {
  using type = BF16;
};
#endif
template <typename T>
using Inner = typename InnerOf<T>::type;

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
void shrink(const AddLoraArgs& a, const Tile& tile, int64_t group, float* wide, Inner<T>* inner) {
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
    Inner<T>* out = inner + (tile.first + r) * a.groups * kRankGroup + group * kRankGroup;
    unroll<kVectors>([&](auto v) VLLM_INLINE { store(out + v * kLanes, sums[r][v] * scale); });
  });
}

// An embedding's A has a row for each token.
template <typename T>
void look_up(const AddLoraArgs& a, const Tile& tile, int64_t group, Inner<T>* inner) {
  const T* table = static_cast<const T*>(a.a) + (tile.adapter * a.groups + group) * a.inner * kRankGroup;
  const Vec scale = set1(a.scales[tile.adapter * a.parts]);
  for (int64_t at = tile.first; at < tile.first + tile.count; ++at) {
    const int64_t row = a.order[at];
    const int64_t id = a.ids_int64 != nullptr ? a.ids_int64[row] : a.ids_int32[row];
    // Another rank may hold this part of the vocabulary.
    const bool held = id >= 0 && id < a.inner;
    Inner<T>* out = inner + at * a.groups * kRankGroup + group * kRankGroup;
    unroll<kVectors>([&](auto v) VLLM_INLINE {
      store(out + v * kLanes, held ? load(table + id * kRankGroup + v * kLanes) * scale : zero());
    });
  }
}

template <bool kWhole, typename T>
Vec load_columns(const T* row, int n) {
  if constexpr (kWhole) return load(row);
  return load_n(row, n);
}

// The sums of R rows over the ranks, of n0 columns and the next n1.
template <bool kWhole, int R, typename T>
void sum_over_ranks(const T* weight, int64_t stride, const float* values, int64_t width, int64_t rank, int n0, int n1,
                    Vec (&sums)[R][2]) {
  for (int64_t j = 0; j < rank; ++j) {
    const T* row = weight + j * stride;
    const Vec first = load_columns<kWhole>(row, n0), second = load_columns<kWhole>(row + n0, n1);
    unroll<R>([&](auto r) VLLM_INLINE {
      const Vec value = set1(values[r * width + j]);
      sums[r][0] = fma(value, first, sums[r][0]);
      sums[r][1] = fma(value, second, sums[r][1]);
    });
  }
}

#if defined(__AVX512BF16__)
// Two ranks at once; behind an odd last one are zeros.
template <bool kWhole, int R>
void sum_over_ranks(const BF16* weight, int64_t stride, const BF16* values, int64_t width, int64_t rank, int n0, int n1,
                    Vec (&sums)[R][2]) {
  alignas(64) uint16_t places[32];
  for (int i = 0; i < 32; ++i) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i side_by_side = _mm512_load_si512(places);
  const auto columns = [](const BF16* row, int n) VLLM_INLINE {
    return kWhole ? _mm256_loadu_si256((const __m256i*)row) : _mm256_maskz_loadu_epi16(lanes_below(n).m, row);
  };
  for (int64_t j = 0; j < rank; j += 2) {
    const bool is_last = j + 1 == rank;
    const BF16 *row = weight + j * stride, *next = row + stride;
    const auto pairs = [&](int64_t at, int n) VLLM_INLINE {
      const __m256i second = is_last ? _mm256_setzero_si256() : columns(next + at, n);
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(columns(row + at, n)), second, 1);
      return (__m512bh)_mm512_permutexvar_epi16(side_by_side, both);
    };
    const __m512bh first = pairs(0, n0), second = pairs(n0, n1);
    const uint32_t kept = is_last ? 0xffffu : 0xffffffffu;
    unroll<R>([&](auto r) VLLM_INLINE {
      uint32_t pair;
      std::memcpy(&pair, values + r * width + j, sizeof(pair));
      const __m512bh value = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair & kept));
      sums[r][0].v = _mm512_dpbf16_ps(sums[r][0].v, first, value);
      sums[r][1].v = _mm512_dpbf16_ps(sums[r][1].v, second, value);
    });
  }
}
#endif

// Adds to n0 columns and the next n1 of R rows: whole vectors, or what is left of them.
template <bool kWhole, typename T, typename Out, int R>
void expand(const AddLoraArgs& a, const Tile& tile, const Inner<T>* inner, int64_t rank, int64_t at, int n0, int n1) {
  const int64_t group_ranks = a.groups / a.parts * kRankGroup, width = a.groups * kRankGroup;
  const T* weight = static_cast<const T*>(a.b) + tile.adapter * group_ranks * a.columns + at;
  Vec sums[R][2];
  unroll<R>([&](auto r) VLLM_INLINE { sums[r][0] = sums[r][1] = zero(); });
  sum_over_ranks<kWhole>(weight, a.columns, inner + tile.first * width, width, rank, n0, n1, sums);
  const int64_t column = tile.adapter * a.columns + at;
  const bool plain = a.gain == nullptr && a.shift == nullptr;
  const auto change = [&](Out* out, Vec sum, int64_t next, int n) VLLM_INLINE {
    Vec before = load_columns<kWhole>(out + next, n), total = before + sum;
    if (!plain) {
      const Vec shift = a.shift == nullptr ? zero() : load_n(a.shift + column + next, n);
      const Vec gain = a.gain == nullptr ? zero() : load_n(a.gain + column + next, n);
      total = fma(before, gain, before + (sum + shift));
    }
    if constexpr (kWhole) {
      store(out + next, total);
    } else {
      store_n(out + next, total, n);
    }
  };
  unroll<R>([&](auto r) VLLM_INLINE {
    Out* out = static_cast<Out*>(a.out) + a.order[tile.first + r] * a.out_stride + at;
    change(out, sums[r][0], 0, n0);
    change(out, sums[r][1], n0, n1);
  });
}

template <typename T, typename Out>
void expand_block(const AddLoraArgs& a, const Tile& tile, const Inner<T>* inner, int64_t part, int64_t from, int64_t to) {
  const int64_t rank = a.ranks[tile.adapter * a.parts + part];
  if (rank == 0 && a.gain == nullptr && a.shift == nullptr) return;
  inner += part * (a.groups / a.parts) * kRankGroup;
  with_rows(tile.count, [&](auto rows) {
    int64_t at = from;
    for (; at + 2 * kLanes <= to; at += 2 * kLanes) {
      expand<true, T, Out, rows>(a, tile, inner, rank, at, kLanes, kLanes);
    }
    if (at == to) return;
    const int n0 = static_cast<int>(least(kLanes, to - at));
    expand<false, T, Out, rows>(a, tile, inner, rank, at, n0, static_cast<int>(to - at) - n0);
  });
}

// The first product of a tile, of one group of ranks.
template <typename T>
void shrink_group(const AddLoraArgs& a, const Tile& tile, int64_t group, float* wide, Inner<T>* inner) {
  const int64_t part_groups = a.groups / a.parts;
  const int64_t rank = a.ranks[tile.adapter * a.parts + group / part_groups];
  if (group % part_groups * kRankGroup >= rank) return;
  if (a.x == nullptr) return look_up<T>(a, tile, group, inner);
  with_rows(tile.count, [&](auto rows) { shrink<T, rows>(a, tile, group, wide, inner); });
}

template <typename T, typename Out>
void add(const AddLoraArgs& a) {
  const Tiles tiles(a);
  if (tiles.count == 0) return;
  const int64_t width = a.groups * kRankGroup;
  Scratch<Inner<T>> inner(a.rows * width);
  int64_t blocks = 0;
  for (int64_t part = 0, from = 0; part < a.parts; from = a.ends[part++]) {
    blocks += (a.ends[part] - from + kColumns - 1) / kColumns;
  }
  const auto expand_task = [&](int64_t task) {
    int64_t block = task % blocks, part = 0, from = 0;
    for (; block * kColumns >= a.ends[part] - from; from = a.ends[part++]) {
      block -= (a.ends[part] - from + kColumns - 1) / kColumns;
    }
    from += block * kColumns;
    expand_block<T, Out>(a, tiles.all[task / blocks], inner.get(), part, from, least(from + kColumns, a.ends[part]));
  };
  // Whole tiles a thread, without waiting between the products, where there are enough of them.
  const bool by_tile = tiles.count >= 2 * max_threads();
#pragma omp parallel if (a.rows * (a.inner + a.columns) > kLeastParallel)
  {
    Scratch<float> wide(a.x == nullptr || kPairs<T> ? 0 : kMaxRows * a.inner);
    if (by_tile) {
#pragma omp for schedule(dynamic)
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        for (int64_t group = 0; group < a.groups; ++group) {
          shrink_group<T>(a, tiles.all[tile], group, wide.get(), inner.get());
        }
        for (int64_t block = 0; block < blocks; ++block) expand_task(tile * blocks + block);
      }
    } else {
#pragma omp for schedule(static)
      for (int64_t task = 0; task < tiles.count * a.groups; ++task) {
        shrink_group<T>(a, tiles.all[task / a.groups], task % a.groups, wide.get(), inner.get());
      }
#pragma omp for schedule(static)
      for (int64_t task = 0; task < tiles.count * blocks; ++task) expand_task(task);
    }
  }
}

}  // namespace

void add_lora(const AddLoraArgs& a) {
  VLLM_DISPATCH_DTYPE(a.dtype, a.out_dtype == DType::f32 ? add<scalar_t, float>(a) : add<scalar_t, scalar_t>(a));
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
