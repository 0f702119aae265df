// The arithmetic of attention_tile.h for bfloat16 in matrix tiles, 16 rows at a time: scores, weighted values and sums of
// weights are their products, over the words of a WidePairChunk, with keys' dimensions beyond head_dim zero and zeros beside
// the values of a chunk that is not full, as a right tile has 32 tokens.
//
// A row's numbers are those of its own chain of operations, whatever the other rows of its tile hold.
//
// Include only from kernels/*.cpp.
#pragma once

#include "attention_tile.h"
#include "tile_lanes.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {

// Head_dim as left tiles have it.
inline int64_t tile_inner(int64_t dim) { return (dim + kTileInner - 1) / kTileInner * kTileInner; }

// Rows whose weights are computed side by side.
constexpr int kAbreast = 4;

// In its life numbers below the smallest normal one count as zero, as they do to matrix tiles: a thread has one while it attends.
class Flushing {
 public:
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~Flushing() { _mm_setcsr(before_); }
  Flushing(const Flushing&) = delete;

 private:
  const unsigned before_;
};

// The sums of add_bf16_products for one row and 16 columns, a word of either at a time.
struct PairSums {
  Vec even = zero(), odd = zero();
  void add(uint32_t row, __m512i columns) {
    const auto upper = [](uint32_t word) { return Vec{_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(word)))}; };
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    even = fma(upper(row << 16), Vec{_mm512_castsi512_ps(_mm512_slli_epi32(columns, 16))}, even);
    odd = fma(upper(row & 0xffff0000u), Vec{_mm512_castsi512_ps(_mm512_and_si512(columns, high))}, odd);
  }
  Vec total() const { return even + odd; }
};

// Scores of R rows without tiles, the same to the bit while numbers are flushed: a few rows would wait longer for a matrix unit
// that has fallen asleep, as it does within a microsecond. Two vectors of tokens at a time; fetches the next chunk.
template <int R>
[[gnu::noinline]] void score_few(const PairChunk& chunk, const BF16* q, int64_t inner, int64_t dim, int tokens, float* scores) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(q);
  for (int first = 0; first < tokens; first += 2 * kLanes) {
    Vec totals[R][2];
    unroll<R>([&](int r) VLLM_INLINE { totals[r][0] = totals[r][1] = zero(); });
    for (int64_t from = 0; from < dim / 2; from += kTileRows) {
      PairSums sums[R][2];
      for (int64_t pair = from; pair < least(from + kTileRows, dim / 2); ++pair) {
        chunk.fetch_next_pair(first / kRun, pair);
        chunk.fetch_next_pair(first / kRun + 1, pair);
        const __m512i low = (__m512i)chunk.key_pair(first, pair), high = (__m512i)chunk.key_pair(first + kLanes, pair);
        unroll<R>([&](int r) VLLM_INLINE {
          sums[r][0].add(words[r * inner / 2 + pair], low);
          sums[r][1].add(words[r * inner / 2 + pair], high);
        });
      }
      unroll<R>([&](int r) VLLM_INLINE {
        totals[r][0] = totals[r][0] + sums[r][0].total();
        totals[r][1] = totals[r][1] + sums[r][1].total();
      });
    }
    unroll<R>([&](int r) VLLM_INLINE {
      store(scores + r * kChunk + first, totals[r][0]);
      store(scores + r * kChunk + first + kLanes, totals[r][1]);
    });
  }
}

// Weighted values likewise, of the tokens from `seen` to `count` alone, and of W vectors of dimensions from `first` on.
template <int R, int W>
inline void add_few(const PairChunk& chunk, const float* weights, float* out, int64_t dim, int64_t first, int from, int tokens,
                    int64_t seen, int64_t count, bool fresh) {
  Vec totals[R][W];
  unroll<R>([&](int r) VLLM_INLINE {
    unroll<W>([&](int w) VLLM_INLINE { totals[r][w] = fresh ? zero() : load(out + r * dim + first + w * kLanes); });
  });
  for (int begin = from / kTileInner * kTileInner; begin < tokens; begin += kTileInner) {
    PairSums sums[R][W];
    for (int t = begin; t < begin + kTileInner; t += 2) {
      const auto mask = [&](int64_t token, uint32_t bits) { return token >= seen && token < count ? bits : 0u; };
      const uint32_t is_seen = mask(t, 0xffffu) | mask(t + 1, 0xffff0000u);
      __m512i values[W];
      unroll<W>([&](int w) VLLM_INLINE { values[w] = (__m512i)chunk.value_pair(t, dim, first + w * kLanes, kLanes, is_seen); });
      unroll<R>([&](int r) VLLM_INLINE {
        uint32_t weight;
        std::memcpy(&weight, weights + r * kChunk + t / 2, sizeof(weight));
        unroll<W>([&](int w) VLLM_INLINE { sums[r][w].add(weight, values[w]); });
      });
    }
    unroll<R>([&](int r) VLLM_INLINE {
      unroll<W>([&](int w) VLLM_INLINE { totals[r][w] = totals[r][w] + sums[r][w].total(); });
    });
  }
  unroll<R>([&](int r) VLLM_INLINE {
    unroll<W>([&](int w) VLLM_INLINE { store(out + r * dim + first + w * kLanes, totals[r][w]); });
  });
}

template <int R>
[[gnu::noinline]] void add_few_values(const PairChunk& chunk, const float* weights, float* out, int64_t dim, int from, int tokens,
                                      int64_t seen, int64_t count, bool fresh) {
  int64_t d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) add_few<R, 2>(chunk, weights, out, dim, d, from, tokens, seen, count, fresh);
  if (d < dim) add_few<R, 1>(chunk, weights, out, dim, d, from, tokens, seen, count, fresh);
}

// Sums of R rows' weights likewise, by lane.
template <int R>
inline void add_few_sums(const float* weights, float* sums, int from, int tokens, bool fresh) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int r = 0; r < R; ++r) {
    Vec total = fresh ? zero() : load(sums + r * kLanes);
    for (int t = from / kTileInner * kTileInner; t < tokens; t += kTileInner) {
      const __m512i words = _mm512_loadu_si512(weights + r * kChunk + t / 2);
      const Vec even{_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))}, odd{_mm512_castsi512_ps(_mm512_and_si512(words, high))};
      total = total + (even + odd);
    }
    store(sums + r * kLanes, total);
  }
}

// 2^x with a relative error of 8e-5, of which bfloat16 shows a fiftieth part of its own; below a normal number it is zero while
// numbers are flushed. NaN stays NaN.
inline Vec tile_weight(Vec x) {
  const Vec r{_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
  Vec p = set1(7.80245233e-2f);
  p = fma(p, r, set1(2.26067159e-1f));
  p = fma(p, r, set1(6.95833537e-1f));
  p = fma(p, r, set1(9.99925219e-1f));
  // Its power is that of x rounded down.
  return {_mm512_scalef_ps(p.v, x.v)};
}

// Scores of rows [R][kChunk] become words of weights rounded to bfloat16, as soften_pairs has them. `sums` are scaled with `out`
// where a maximum rises, not added to.
template <int R>
[[gnu::noinline]] void weigh_rows(float* scores, const int* from, const int* valid, int tokens, float factor, float* out,
                                  float* row_max, float* sums, int64_t dim, bool fresh) {
  Vec top[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    raise_top(scores + r * kChunk, from[r], valid[r], tokens, factor, row_max + r, fresh, [&](Vec shrink) VLLM_INLINE {
      store(sums + r * kLanes, load(sums + r * kLanes) * shrink);
      scale_into(out + r * dim, out + r * dim, shrink, dim);
    });
    top[r] = set1(-row_max[r]);
  }
  for (int t = 0; t < tokens; t += kWeightsAtOnce) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float* score = scores + r * kChunk + t;
      const Vec low = tile_weight(fma(load(score), set1(factor), top[r]));
      const Vec high = tile_weight(fma(load(score + kLanes), set1(factor), top[r]));
      _mm512_storeu_si512(scores + r * kChunk + t / 2, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
    }
  }
}

// Adjusts `rows` rows' scores and turns them into words of weights; the other arguments are those of AttentionTiles::attend.
template <typename Adjust>
[[gnu::always_inline]] inline void soften_rows(float* scores, int rows, const int* from, const int* valid, int tokens, float factor,
                                               bool adjusts, const Adjust& adjust, float* out, float* row_max, float* sums,
                                               int64_t dim, bool fresh) {
  for (int r = 0; r < rows && adjusts; ++r) {
    float* row = scores + r * kChunk;
    scale_into(row, row, set1(factor), tokens);
    adjust(row, r, tokens);
  }
  with_rows<kAbreast>(rows, [&]<int R>() VLLM_INLINE {
    weigh_rows<R>(scores, from, valid, tokens, adjusts ? 1.0f : factor, out, row_max, sums, dim, fresh);
  });
}

// AttentionTiles::attend of R rows without tiles, of a chunk as it lies in the cache whose tokens from `seen` to `count` are there.
template <int R, typename Adjust>
void attend_few(const PairChunk& chunk, const BF16* q, int64_t inner, int64_t dim, const int* from, const int* valid, int tokens,
                int64_t seen, int64_t count, float factor, bool adjusts, const Adjust& adjust, float* scores, float* out,
                float* row_max, float* sums, bool fresh) {
  tokens = static_cast<int>(round_up_weights(tokens));
  score_few<R>(chunk, q, inner, dim, tokens, scores);
  soften_rows(scores, R, from, valid, tokens, factor, adjusts, adjust, out, row_max, sums, dim, fresh);
  add_few_sums<R>(scores, sums, from[0], tokens, fresh);
  add_few_values<R>(chunk, scores, out, dim, from[0], tokens, seen, count, fresh);
}

// Rows that attend a chunk, from `row` on: up to 16, each tokens from from[r] to valid[r] of it, none those from `tokens` on.
struct RowBlock {
  int64_t row;
  int rows, tokens;
  int from[kTileRows], valid[kTileRows];
};

// Rows of queries that a kernel of `rows` rows has memory for: a block reads kTileRows of them.
inline int64_t query_rows(int64_t rows) { return rows + kTileRows - 1; }

// The rows of a step, of which the first one's query, weighted values, maximum and sums are here.
struct StepRows {
  const BF16* q;  // [rows][inner]
  int64_t inner, dim;
  float *out, *row_max, *sums;
  bool fresh;
};

// A thread's tiles: 0 to 3 are sums; 4 queries, 5 weights; 6 and 7 columns.
class AttentionTiles {
 public:
  // For values of `dim`.
  explicit AttentionTiles(int64_t dim) : memory_(kBlocks * kScores + kTileRows * (dim + kLanes)) {
    scores_ = memory_.get();
    rest_sums_ = scores_ + kBlocks * kScores;
    rest_out_ = rest_sums_ + kTileRows * kLanes;
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kTileRows);
    configure_tiles(shapes);
    for (int pair = 0; pair < kTileRows; ++pair) {
      for (int lane = 0; lane < kLanes; ++lane) ones_[pair][lane] = pair == lane ? 0x3f803f80 : 0;
    }
  }
  AttentionTiles(const AttentionTiles&) = delete;
  ~AttentionTiles() { release_tiles(); }

  // Lets `count` rows attend a chunk. find(row, rows, from, valid) is TileRows::find_seen, and before(i, n) comes before the
  // i-th of n blocks. Where it `adjusts`, adjust(row, scores, tokens) changes those of a row, which are in units of log2 then.
  //
  // While a block's weights are computed, the matrix unit multiplies the scores of the next one and the values of the one before.
  template <typename Find, typename Before, typename Adjust>
  void attend(const WidePairChunk& chunk, const StepRows& all, int64_t count, const Find& find, const Before& before, float factor,
              bool adjusts, const Adjust& adjust) {
    if (count <= 0) return;
    const int64_t blocks = (count + kTileRows - 1) / kTileRows;
    RowBlock some[kBlocks];
    const auto begin = [&](int64_t i) VLLM_INLINE {
      RowBlock& block = some[i % kBlocks];
      block.row = i * kTileRows;
      block.rows = static_cast<int>(least(kTileRows, count - block.row));
      block.tokens = static_cast<int>(round_up_weights(find(block.row, block.rows, block.from, block.valid)));
    };
    const auto scores_of = [&](int64_t i) { return scores_ + i % kBlocks * kScores; };
    begin(0);
    for (int half = 0; half < 2; ++half) score(chunk, all, some[0], half, scores_of(0));
    for (int64_t i = 0; i < blocks; ++i) {
      before(i, blocks);
      if (i + 1 < blocks) begin(i + 1);
      const RowBlock& block = some[i % kBlocks];
      // Products between the weights of a few rows take less time than a burst of all.
      for (int turn = 0; turn < kTileRows / kAbreast; ++turn) {
        if (turn % 2 == 0) {
          if (i + 1 < blocks) score(chunk, all, some[(i + 1) % kBlocks], turn / 2, scores_of(i + 1));
        } else if (i > 0) {
          add_values(chunk, all, some[(i - 1) % kBlocks], turn / 2, scores_of(i - 1));
        }
        const int first = turn * kAbreast, rows = static_cast<int>(least(kAbreast, block.rows - first));
        if (rows <= 0) continue;
        const int64_t row = block.row + first;
        soften_rows(scores_of(i) + first * kChunk, rows, block.from + first, block.valid + first, block.tokens, factor, adjusts,
                    [&](float* scores, int r, int tokens) VLLM_INLINE { adjust(row + r, scores, tokens); },
                    all.out + row * all.dim, all.row_max + row, all.sums + row * kLanes, all.dim, all.fresh);
      }
    }
    for (int half = 0; half < 2; ++half) add_values(chunk, all, some[(blocks - 1) % kBlocks], half, scores_of(blocks - 1));
  }

 private:
  // Blocks that are in work at once.
  static constexpr int64_t kBlocks = 3, kScores = kTileRows * kChunk;

  // A block's scores of half of the chunk or, where queries are so long that they are better loaded once, in the first half of all.
  [[gnu::always_inline]] static void score(const WidePairChunk& chunk, const StepRows& all, const RowBlock& block, int half,
                                           float* scores) {
    const int first = half * kWeightsAtOnce;
    if (first >= block.tokens) return;
    if (all.inner <= 2 * kTileInner || block.tokens <= kWeightsAtOnce) {
      score_tiles<2>(chunk.keys + first, all.q + block.row * all.inner, all.inner, scores + first);
    } else if (half == 0) {
      score_tiles<4>(chunk.keys, all.q + block.row * all.inner, all.inner, scores);
    }
  }

  // scores[N tiles of 16 tokens] = q k.
  template <int N>
  [[gnu::always_inline]] static void score_tiles(const uint32_t* keys, const BF16* q, int64_t inner, float* scores) {
    unroll<N>([&](auto n) VLLM_INLINE { zero_tile<n>(); });
    for (int64_t d = 0; d < inner; d += kTileInner) {
      load_tile<4>(q + d, inner * sizeof(BF16));
      unroll<N>([&](auto n) VLLM_INLINE {
        load_tile<6 + n % 2>(keys + d / 2 * kChunk + n * kTileRows, kChunk * sizeof(float));
        add_bf16_products<n, 4, 6 + n % 2>();
      });
    }
    unroll<N>([&](auto n) VLLM_INLINE { store_tile<n>(scores + n * kTileRows, kChunk * sizeof(float)); });
  }

  // Adds to half of a block's values, and with the second half to its sums. Tiles have 16 rows, so that a block of fewer is added
  // to in a place of its own.
  [[gnu::always_inline]] void add_values(const WidePairChunk& chunk, const StepRows& all, const RowBlock& block, int half,
                                         const float* weights) {
    const int64_t dim = all.dim, tiles = dim / kTileRows, end = tiles * (half + 1) / 2;
    const bool is_rest = block.rows < kTileRows;
    const int64_t out_bytes = block.rows * dim * sizeof(float), sums_bytes = block.rows * kLanes * sizeof(float);
    float *whole_out = all.out + block.row * dim, *whole_sums = all.sums + block.row * kLanes;
    float *out = is_rest ? rest_out_ : whole_out, *sums = is_rest ? rest_sums_ : whole_sums;
    if (is_rest && half == 0 && !all.fresh) {
      std::memcpy(out, whole_out, out_bytes);
      std::memcpy(sums, whole_sums, sums_bytes);
    }
    for (int64_t tile = tiles * half / 2, some = 0; tile < end; tile += some) {
      some = least(end - tile, 4);
      with_rows<4>(static_cast<int>(some), [&]<int N>() VLLM_INLINE {
        const int64_t column = tile * kTileRows;
        add_tiles<N>(chunk.values + column, dim, kTileInner / 2 * dim, weights, block, out + column, dim, all.fresh);
      });
    }
    if (half == 0) return;
    add_tiles<1>(&ones_[0][0], kLanes, 0, weights, block, sums, kLanes, all.fresh);
    if (!is_rest) return;
    std::memcpy(whole_out, out, out_bytes);
    std::memcpy(whole_sums, sums, sums_bytes);
  }

  // to[N tiles of 16 columns, whose rows have `width`] += weights values, whose rows are of `row` words, those of the next 32
  // tokens `next` words away.
  template <int N>
  [[gnu::always_inline]] static void add_tiles(const uint32_t* values, int64_t row, int64_t next, const float* weights,
                                               const RowBlock& block, float* to, int64_t width, bool fresh) {
    unroll<N>([&](auto n) VLLM_INLINE {
      if (fresh) {
        zero_tile<n>();
      } else {
        load_tile<n>(to + n * kTileRows, width * sizeof(float));
      }
    });
    for (int part = block.from[0] / kTileInner; part < block.tokens / kTileInner; ++part) {
      load_tile<5>(weights + part * kTileInner / 2, kChunk * sizeof(float));
      unroll<N>([&](auto n) VLLM_INLINE {
        load_tile<6 + n % 2>(values + part * next + n * kTileRows, row * sizeof(uint32_t));
        add_bf16_products<n, 5, 6 + n % 2>();
      });
    }
    unroll<N>([&](auto n) VLLM_INLINE { store_tile<n>(to + n * kTileRows, width * sizeof(float)); });
  }

  Scratch<float> memory_;
  float *scores_, *rest_sums_, *rest_out_;
  // Words that sum the weights of two neighbouring tokens, each pair in a lane of its own.
  alignas(64) uint32_t ones_[kTileRows][kLanes];
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
