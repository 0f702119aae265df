// The products of adapters in a product's own passes over memory: rows of x are multiplied with their adapter's A where they
// are packed, by the thread that packs them, and the results with its B where a tile's sums are written.
//
// Each sum is a chain, or two, in the order of k, or of the ranks, however many rows are taken at once.
//
// Include only from gemm.h.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "scratch.h"
#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kRankVectors = kRankGroup / kLanes;
// Rows that are multiplied with A at once: with few lanes one chain for each fills the registers.
constexpr int kAdaptedRows = kLanes == 16 ? 8 : kLanes == 8 ? 4 : 2;
constexpr int kShrinkChains = kLanes == 16 ? 2 : 1;
// And with B.
constexpr int kExpandedRows = 4;

// Whether products of two values are one instruction.
template <typename T>
constexpr bool kDotsOf = false;
#if defined(__AVX512BF16__)
template <>
constexpr bool kDotsOf<BF16> = true;
#endif

// The operand of A and B: with such instructions the value between them is rounded to bfloat16, too.
template <typename T>
using AdaptedValue = std::conditional_t<kDotsOf<T>, BF16, float>;

// Values of k, or ranks, that stand side by side in A and B.
template <typename T>
constexpr int kSideBySide = std::is_same_v<T, BF16> ? 2 : 1;

// sums[r][v] += kSideBySide values x(r) from k on, times those rows of `weight` [.., 16], from lane `lane` on.
template <typename T, int R, int V, typename X>
[[gnu::always_inline]] inline void add_step(const X& x, const T* weight, int64_t k, int64_t lane, Vec (&sums)[R][V]) {
  const T* row = weight + k * kRankGroup;
  if constexpr (kDotsOf<T>) {
#if defined(__AVX512BF16__)
    const __m512bh ranks = (__m512bh)_mm512_loadu_si512(row);
    unroll<R>([&](auto r) VLLM_INLINE {
      int32_t pair;
      std::memcpy(&pair, x(r) + k, sizeof(pair));
      sums[r][0].v = _mm512_dpbf16_ps(sums[r][0].v, ranks, (__m512bh)_mm512_set1_epi32(pair));
    });
#endif
  } else if constexpr (kSideBySide<T> == 2) {
    unroll<V>([&](auto v) VLLM_INLINE {
      Vec even, odd;
      load_bf16_pair(row + 2 * (lane + v * kLanes), &even, &odd);
      unroll<R>([&](auto r) VLLM_INLINE {
        sums[r][v] = fma(set1(x(r)[k + 1]), odd, fma(set1(x(r)[k]), even, sums[r][v]));
      });
    });
  } else {
    unroll<V>([&](auto v) VLLM_INLINE {
      const Vec ranks = load(row + lane + v * kLanes);
      unroll<R>([&](auto r) VLLM_INLINE { sums[r][v] = fma(set1(x(r)[k]), ranks, sums[r][v]); });
    });
  }
}

// f of a number of rows, up to R, as a constant.
template <int R, typename F>
[[gnu::always_inline]] inline void with_count(int64_t count, const F& f) {
  if (count == R) return f(Constant<R>{});
  if constexpr (R > 1) with_count<R - 1>(count, f);
}

// Rows that have one adapter, -1: none, by their places in the order of all.
struct AdaptedTile {
  int64_t adapter, first, count;
};

// Tiles of the rows in places [begin, end).
class AdaptedTiles {
 public:
  AdaptedTiles(const AdaptedArgs& a, int64_t begin, int64_t end) : all_((end - begin) / kAdaptedRows + a.adapters + 1) {
    for (int64_t adapter = 0; adapter <= a.adapters; ++adapter) {
      const bool is_none = adapter == a.adapters;
      const int64_t last = is_none ? end : least(end, a.starts[adapter + 1]);
      for (int64_t at = a.starts[adapter] < begin ? begin : a.starts[adapter]; at < last; at += kAdaptedRows) {
        all_[count_++] = {is_none ? -1 : adapter, at, least(kAdaptedRows, last - at)};
      }
    }
  }
  int64_t count() const { return count_; }
  const AdaptedTile& operator[](int64_t i) const { return all_[i]; }

 private:
  int64_t count_ = 0;
  Scratch<AdaptedTile> all_;
};

// Where a product keeps its rows' adapters and their products with A, unless it is given them.
template <typename T>
class AdaptedMemory {
 public:
  explicit AdaptedMemory(LinearArgs& a)
      : rows_(is_needed(a) ? a.rows : 0), products_(is_needed(a) ? a.rows * a.adapted.groups * kRankGroup : 0) {
    if (!is_needed(a)) return;
    a.adapted.adapted_rows = rows_.get();
    a.adapted.products = products_.get();
  }

 private:
  static bool is_needed(const LinearArgs& a) { return a.adapted.order != nullptr && a.adapted.adapted_rows == nullptr; }

  Scratch<AdaptedRow> rows_;
  Scratch<AdaptedValue<T>> products_;
};

// s times the sums of R rows over k with the ranks of one group of A.
template <typename T, int R>
[[gnu::noinline]] void shrink_group(const AdaptedValue<T>* const* x, int64_t inner, const T* weight, float scale,
                                    AdaptedValue<T>* const* out) {
  // The hardware's own prefetch stops at each page.
  constexpr int64_t kAhead = 4096 / sizeof(T);
  constexpr int kStep = kSideBySide<T>;
  Vec sums[kShrinkChains][R][kRankVectors];
  unroll<kShrinkChains>([&](auto c) VLLM_INLINE {
    unroll<R>([&](auto r) VLLM_INLINE {
      unroll<kRankVectors>([&](auto v) VLLM_INLINE { sums[c][r][v] = zero(); });
    });
  });
  const AdaptedValue<T>* rows[R];
  unroll<R>([&](auto r) VLLM_INLINE { rows[r] = x[r]; });
  const auto row_at = [&](auto r) VLLM_INLINE { return rows[r]; };
  int64_t k = 0;
  for (; k + kShrinkChains * kStep <= inner; k += kShrinkChains * kStep) {
    unroll<kShrinkChains>([&](auto c) VLLM_INLINE {
      __builtin_prefetch(weight + (k + c * kStep) * kRankGroup + kAhead);
      add_step<T>(row_at, weight, k + c * kStep, 0, sums[c]);
    });
  }
  if (k < inner) add_step<T>(row_at, weight, k, 0, sums[0]);
  unroll<R>([&](auto r) VLLM_INLINE {
    unroll<kRankVectors>([&](auto v) VLLM_INLINE {
      Vec sum = sums[0][r][v];
      if constexpr (kShrinkChains == 2) sum = sum + sums[1][r][v];
      store(out[r] + v * kLanes, sum * set1(scale));
    });
  });
}

// That an adapter has in any part.
inline int64_t most_ranks(const AdaptedArgs& l, int64_t adapter) {
  int32_t most = 0;
  for (int64_t part = 0; part < l.parts; ++part) {
    const int32_t own = l.ranks[adapter * l.parts + part];
    if (own > most) most = own;
  }
  return most;
}

// The rows of a tile, whose values are x, times their adapter's A.
template <typename T>
[[gnu::noinline]] void shrink(const LinearArgs& a, const AdaptedTile& tile, const T* const* x) {
  using Value = AdaptedValue<T>;
  const AdaptedArgs& l = a.adapted;
  Value* out[kAdaptedRows];
  const Value* values[kAdaptedRows];
  const int64_t chunks = tile.adapter < 0 ? 0 : (most_ranks(l, tile.adapter) + kRankChunk - 1) / kRankChunk;
  for (int64_t r = 0; r < tile.count; ++r) {
    const int64_t place = tile.first + r;
    l.adapted_rows[place] = {static_cast<int32_t>(tile.adapter), static_cast<int32_t>(chunks)};
    out[r] = static_cast<Value*>(l.products) + place * l.groups * kRankGroup;
  }
  if (chunks == 0) return;
  const int64_t inner = (a.inner + kSideBySide<T> - 1) / kSideBySide<T> * kSideBySide<T>;
  const bool as_they_are = std::is_same_v<T, Value> && inner == a.inner;
  const Scratch<Value> other(as_they_are ? 0 : tile.count * inner);
  for (int64_t r = 0; r < tile.count; ++r) {
    if (as_they_are) {
      values[r] = reinterpret_cast<const Value*>(x[r]);
      continue;
    }
    Value* to = other.get() + r * inner;
    for (int64_t k = 0; k < inner; k += kLanes) {
      const int n = static_cast<int>(least(kLanes, inner - k)), there = static_cast<int>(least(n, a.inner - k));
      store_n(to + k, load_n(x[r] + k, there), n);
    }
    values[r] = to;
  }
  const int64_t part_groups = l.groups / l.parts;
  for (int64_t group = 0; group < l.groups; ++group) {
    const int64_t part = group / part_groups;
    if (group % part_groups * kRankGroup < l.ranks[tile.adapter * l.parts + part]) {
      const T* weight = static_cast<const T*>(l.a) + (tile.adapter * l.groups + group) * inner * kRankGroup;
      const float scale = l.scales[tile.adapter * l.parts + part];
      with_count<kAdaptedRows>(tile.count, [&](auto rows) VLLM_INLINE {
        shrink_group<T, rows>(values, inner, weight, scale, out);
      });
    } else {
      for (int64_t r = 0; r < tile.count; ++r) std::memset(out[r], 0, kRankGroup * sizeof(Value));
    }
    for (int64_t r = 0; r < tile.count; ++r) out[r] += kRankGroup;
  }
}

// sums[r * stride + h] += the products of R rows, each `width` values behind the one before, with H blocks of B, that of h
// behind products[h]. kShared: all are the same part's.
template <typename T, int R, int H, bool kShared>
[[gnu::always_inline]] inline void expand(const AdaptedValue<T>* const (&products)[H], int64_t width, const T* const (&blocks)[H],
                                          int64_t chunks, int64_t lane, Vec* sums, int64_t stride) {
  constexpr int kStep = kSideBySide<T>;
  Vec own[H][R][1];
  unroll<H>([&](auto h) VLLM_INLINE { unroll<R>([&](auto r) VLLM_INLINE { own[h][r][0] = zero(); }); });
  for (int64_t k = 0; k < chunks * kRankChunk; k += kRankChunk) {
    unroll<kRankChunk / kStep>([&](auto i) VLLM_INLINE {
      unroll<H>([&](auto h) VLLM_INLINE {
        const AdaptedValue<T>* from = products[kShared ? 0 : h] + k;
        add_step<T>([&](auto r) VLLM_INLINE { return from + r * width; }, blocks[h] + k * kRankGroup, i * kStep, lane, own[h]);
      });
    });
  }
  unroll<R>([&](auto r) VLLM_INLINE {
    unroll<H>([&](auto h) VLLM_INLINE { sums[r * stride + h] = sums[r * stride + h] + own[h][r][0]; });
  });
}

// Expand `count` rows that have one adapter, from the place of `products` on, in blocks `first` and, if H is 2, `first` + 1.
template <typename T, int H, bool kShared>
inline void expand_rows(const AdaptedArgs& l, const AdaptedRow& adapted, int64_t first, int64_t place, int count, int64_t lane,
                        Vec* sums, int64_t stride) {
  const int64_t width = l.groups * kRankGroup, block_size = l.part_ranks * kBlockColumns;
  const AdaptedValue<T>* products[H];
  const T* blocks[H];
  unroll<H>([&](auto h) VLLM_INLINE {
    products[h] = static_cast<const AdaptedValue<T>*>(l.products) + place * width + l.block_parts[first + h] * l.part_ranks;
    blocks[h] = static_cast<const T*>(l.b) + ((first + h) * l.adapters + adapted.adapter) * block_size;
  });
  while (count > 0) {
    with_count<kExpandedRows>(least(count, kExpandedRows), [&](auto rows) VLLM_INLINE {
      expand<T, rows, H, kShared>(products, width, blocks, adapted.chunks, lane, sums, stride);
    });
    count -= kExpandedRows;
    sums += kExpandedRows * stride;
    unroll<H>([&](auto h) VLLM_INLINE { products[h] += kExpandedRows * width; });
  }
}

// sums [rows][panels][2] become (sums + bias) (1 + gain) + shift - bias of the adapter.
template <typename T>
[[gnu::noinline]] void change_sums(const LinearArgs& a, int32_t adapter, Vec* sums, int rows, int panels, int64_t panel,
                                   int64_t lane) {
  const int64_t columns = (a.columns + 31) / 32 * 32;
  for (int half = 0; half < 2 * panels; ++half) {
    const int64_t column = (panel * 2 + half) * kBlockColumns + lane, left = a.columns - column;
    Vec bias = zero();
    if (a.bias != nullptr && left > 0) {
      bias = load_n(static_cast<const T*>(a.bias) + column, static_cast<int>(least(left, kLanes)));
    }
    const Vec gain = load(a.adapted.gain + adapter * columns + column);
    const Vec shift = load(a.adapted.shift + adapter * columns + column);
    for (int r = 0; r < rows; ++r) {
      Vec& sum = sums[r * 2 * panels + half];
      sum = sum + fma(sum + bias, gain, shift);
    }
  }
}

// sums [rows][panels][2], kLanes columns of each half of a panel from `lane` on, become what the adapters of the rows from
// `place` on make of them.
template <typename T>
[[gnu::noinline]] void adapt_sums(const LinearArgs& a, Vec* sums, int rows, int panels, int64_t place, int64_t panel,
                                  int64_t lane) {
  const AdaptedArgs& l = a.adapted;
  const int64_t stride = 2 * panels;
  for (int r = 0, count; r < rows; r += count) {
    const AdaptedRow adapted = l.adapted_rows[place + r];
    for (count = 1; r + count < rows && l.adapted_rows[place + r + count].adapter == adapted.adapter;) ++count;
    if (adapted.adapter < 0) continue;
    Vec* own = sums + r * stride;
    if (l.gain != nullptr) change_sums<T>(a, adapted.adapter, own, count, panels, panel, lane);
    for (int p = 0; p < panels; ++p, own += 2) {
      const int32_t* blocks = l.first_blocks + 2 * (panel + p);
      const auto with = [&](auto halves, auto shared, int64_t block, Vec* from) VLLM_INLINE {
        expand_rows<T, halves, shared == 1>(l, adapted, block, place + r, count, lane, from, stride);
      };
      if (blocks[1] != blocks[0] + 1 || blocks[2] != blocks[1] + 1) {
        for (int64_t block = blocks[0]; block < blocks[1]; ++block) with(Constant<1>{}, Constant<1>{}, block, own);
        for (int64_t block = blocks[1]; block < blocks[2]; ++block) with(Constant<1>{}, Constant<1>{}, block, own + 1);
      } else if (l.block_parts[blocks[0]] == l.block_parts[blocks[1]]) {
        with(Constant<2>{}, Constant<1>{}, blocks[0], own);
      } else {
        with(Constant<2>{}, Constant<0>{}, blocks[0], own);
      }
    }
  }
}

// Fetches what the rows' adapters have for panels [panel, stop). Not a function that is called: GCC takes one that only fetches
// for free of effects, and drops it.
template <typename T>
[[gnu::always_inline]] inline void fetch_blocks(const LinearArgs& a, int64_t panel, int64_t stop) {
  const AdaptedArgs& l = a.adapted;
  const int64_t block_bytes = l.part_ranks * kBlockColumns * static_cast<int64_t>(sizeof(T));
  const char* blocks = static_cast<const char*>(l.b);
  for (int64_t adapter = 0; adapter < l.adapters; ++adapter) {
    if (l.starts[adapter] == l.starts[adapter + 1]) continue;
    for (int64_t block = l.first_blocks[2 * panel]; block < l.first_blocks[2 * stop]; ++block) {
      const char* at = blocks + (block * l.adapters + adapter) * block_bytes;
      for (int64_t i = 0; i < block_bytes; i += 64) __builtin_prefetch(at + i);
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
