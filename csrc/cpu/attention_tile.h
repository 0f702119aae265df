// The arithmetic of paged_attention.cpp: scores, softmax and weighted values of rows over one chunk of a context.
//
// A row's numbers are those of its own chain of operations: neither how many rows share a register tile, nor whether
// keys and values are widened (or put in pairs) in registers or beforehand, changes a bit of them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "float8.h"
#include "gates.h"
#include "scratch.h"
#include "vec.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int kChunk = 64;
constexpr int kRun = 16;  // neighbouring tokens of a key vector
constexpr int kRuns = kChunk / kRun;
constexpr int kWeightsAtOnce = 32;  // that become bfloat16
// Accumulators of a register tile: kRows rows times kWide vectors.
constexpr int kRows = kLanes == 4 ? 4 : 6;
constexpr int kWide = kLanes == 16 ? 4 : 2;
// A row's weights are relative to a maximum that may lag by this power of two: chasing it costs more than it saves.
constexpr float kLag = 8.0f;

inline int64_t round_up_weights(int64_t tokens) { return (tokens + kWeightsAtOnce - 1) / kWeightsAtOnce * kWeightsAtOnce; }

// A chunk as it lies in the cache: a run of 16 tokens is [head_dim] rows of neighbouring keys, and [16] rows of values.
// While it is computed the next one is fetched, a row of keys each dimension and a row of values each token.
template <typename T>
struct Chunk {
  const T* keys[kRuns];
  const T* values[kRuns];
  int64_t key_stride;
  const Chunk* next;

  static constexpr bool kFetchesNext = true, kInPairs = false;
  const T* key(int token) const { return keys[token / kRun] + token % kRun; }
  const T* value(int token, int64_t dim) const { return values[token / kRun] + token % kRun * dim; }

  // Fetches part `part` of `parts` of the next chunk into the second-level cache. Inline: GCC takes a call for free of effects
  // and drops it.
  [[gnu::always_inline]] void fetch_next(int64_t part, int64_t parts, int64_t dim) const {
    // Several neighbouring rows may lie in a line.
    const int64_t step = key_stride == kRun && sizeof(T) < 4 ? 4 / static_cast<int64_t>(sizeof(T)) : 1;
    const int64_t begin = (dim * part / parts + step - 1) / step * step, end = dim * (part + 1) / parts;
    for (int64_t d = begin; d < end; d += step) {
#pragma GCC unroll 4
      for (int run = 0; run < kRuns; ++run) {
        __builtin_prefetch(next->keys[run] + d * key_stride, 0, 2);
        __builtin_prefetch(next->values[run] + d * kRun, 0, 2);
      }
    }
  }
};

// A chunk in float32.
struct WideChunk {
  float* keys;    // [head_dim][kChunk]
  float* values;  // [kChunk][head_dim]
  static constexpr int64_t key_stride = kChunk;

  static constexpr bool kFetchesNext = false, kInPairs = false;
  const float* key(int token) const { return keys + token; }
  const float* value(int token, int64_t dim) const { return values + token * dim; }
};

#if defined(__AVX512BF16__)
// Chunks for the bfloat16 dot-product instructions and for matrix tiles, which multiply words of two neighbours, dimensions
// of a key or tokens of a value. Products are exact and sums float32, as those of the multiply-adds. Rows of q are words,
// too, in the first half of their memory and unscaled; so become the rows of weights, rounded to bfloat16.
struct PairChunk : Chunk<BF16> {
  static constexpr bool kInPairs = true;

  __m512bh key_pair(int token, int64_t pair) const {
    const BF16* at = key(token) + 2 * pair * key_stride;
    // Two neighbouring dimensions of a run lie in one vector then.
    if (key_stride == kRun) return (__m512bh)_mm512_permutexvar_epi16(places(0, kRun), _mm512_loadu_si512(at));
    return (__m512bh)words_of(at, at + key_stride, kLanes);
  }

  // Fetches what the next chunk has in the place of a run's pair of dimensions, and as much of its values.
  [[gnu::always_inline]] void fetch_next_pair(int run, int64_t pair) const {
    __builtin_prefetch(next->keys[run] + 2 * pair * key_stride);
    if (key_stride != kRun) __builtin_prefetch(next->keys[run] + (2 * pair + 1) * key_stride);
    __builtin_prefetch(next->values[run] + 2 * pair * kRun);
  }

  // The word has `n` dimensions from `d` on; `seen` masks tokens that may be no numbers.
  __m512bh value_pair(int token, int64_t dim, int64_t d, int n, uint32_t seen) const {
    const BF16* at = value(token, dim) + d;
    return (__m512bh)_mm512_and_si512(words_of(at, at + dim, n), _mm512_set1_epi32(static_cast<int>(seen)));
  }

  // value_pair of W vectors of dimensions.
  template <int W>
  [[gnu::always_inline]] void value_pairs(int token, int64_t dim, int64_t d, int n, uint32_t seen, __m512bh (&pairs)[W]) const {
    if constexpr (W % 2 == 0) {
      const BF16* at = value(token, dim) + d;
      const __m512i mask = _mm512_set1_epi32(static_cast<int>(seen));
      unroll<W / 2>([&](int w) VLLM_INLINE {
        __m512i words[2];
        two_words_of(at + w * 2 * kLanes, at + dim + w * 2 * kLanes, words);
        pairs[2 * w] = (__m512bh)_mm512_and_si512(words[0], mask);
        pairs[2 * w + 1] = (__m512bh)_mm512_and_si512(words[1], mask);
      });
    } else {
      unroll<W>([&](int w) VLLM_INLINE { pairs[w] = value_pair(token, dim, d + w * kLanes, n, seen); });
    }
  }

  static __m512i words_of(const BF16* first, const BF16* second, int n) {
    const auto read = [&](const BF16* from) VLLM_INLINE {
      return n == kLanes ? _mm256_loadu_si256((const __m256i*)from) : _mm256_maskz_loadu_epi16(lanes_below(n).m, from);
    };
    return _mm512_or_si512(_mm512_cvtepu16_epi32(read(first)), _mm512_slli_epi32(_mm512_cvtepu16_epi32(read(second)), 16));
  }

  // The same of twice as many values.
  static void two_words_of(const BF16* first, const BF16* second, __m512i (&words)[2]) {
    const __m512i one = _mm512_loadu_si512(first), other = _mm512_loadu_si512(second);
    words[0] = _mm512_permutex2var_epi16(one, places(0, 2 * kLanes), other);
    words[1] = _mm512_permutex2var_epi16(one, places(kLanes, 2 * kLanes), other);
  }

 private:
  // Each word has the value at a place, counted from `first`, and the one `distance` beyond it.
  static __m512i places(int first, int distance) {
    const __m512i order = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_add_epi32(_mm512_mullo_epi32(order, _mm512_set1_epi32(0x10001)),
                            _mm512_set1_epi32(first | (first + distance) << 16));
  }
};

// With all words made.
struct WidePairChunk {
  uint32_t* keys;    // [head_dim / 2][kChunk]
  uint32_t* values;  // [kChunk / 2][value_dim]

  static constexpr bool kFetchesNext = false, kInPairs = true;
  __m512bh key_pair(int token, int64_t pair) const {
    return (__m512bh)_mm512_loadu_si512(keys + pair * kChunk + token);
  }
  __m512bh value_pair(int token, int64_t dim, int64_t d, int n, uint32_t) const {
    return (__m512bh)load_n(reinterpret_cast<const float*>(values) + token / 2 * dim + d, n).v;
  }

  template <int W>
  [[gnu::always_inline]] void value_pairs(int token, int64_t dim, int64_t d, int n, uint32_t seen, __m512bh (&pairs)[W]) const {
    unroll<W>([&](int w) VLLM_INLINE { pairs[w] = value_pair(token, dim, d + w * kLanes, n, seen); });
  }

  // Makes words of the values of the tokens from `from` to `end`, both even, of which value_at(t) is that of t; null stands
  // for zeros.
  template <typename At>
  void pack_values(int64_t from, int64_t end, int64_t dim, const At& value_at) const {
    for (int64_t t = from; t < end; t += 2) {
      const BF16 *first = value_at(t), *second = value_at(t + 1);
      int64_t d = 0;
      for (uint32_t* to = values + t / 2 * dim; first && second && d + 2 * kLanes <= dim; d += 2 * kLanes) {
        __m512i words[2];
        PairChunk::two_words_of(first + d, second + d, words);
        _mm512_storeu_si512(to + d, words[0]);
        _mm512_storeu_si512(to + d + kLanes, words[1]);
      }
      for (; d < dim; d += kLanes) {
        alignas(32) static constexpr BF16 none[kLanes] = {};
        const int n = static_cast<int>(least(kLanes, dim - d));
        const __m512i words = PairChunk::words_of(first ? first + d : none, second ? second + d : none, n);
        store_n(reinterpret_cast<float*>(values) + t / 2 * dim + d, {_mm512_castsi512_ps(words)}, n);
      }
    }
  }
};

template <bool kDots>
using WideChunkOf = std::conditional_t<kDots, WidePairChunk, WideChunk>;
#else
template <bool kDots>
using WideChunkOf = WideChunk;
#endif

// Weighted values [rows][head_dim] of a part of the context, their weights' sums and the maxima these are relative to.
struct Partial {
  float* out;
  float* max;
  float* sum;
};

template <typename C>
inline void fetch_keys(const C& chunk, int64_t d) {
  if constexpr (C::kFetchesNext) {
#pragma GCC unroll 4
    for (int run = 0; run < kRuns; ++run) __builtin_prefetch(chunk.next->keys[run] + d * chunk.key_stride);
  }
}

template <typename C>
inline void fetch_value(const C& chunk, int token, int64_t dim, int64_t first) {
  if constexpr (C::kFetchesNext) {
    const auto* next = chunk.next->value(token, dim) + first;
    __builtin_prefetch(next);
    __builtin_prefetch(next + 64 / sizeof(*next));
  }
}

#if defined(__AVX512BF16__)
// sums[R][W vectors from token `first`] += q k, two dimensions at a time.
template <int R, int W, typename C>
inline void add_key_pairs(const C& chunk, const float* q, int64_t dim, int first, Vec (&sums)[R][W]) {
  for (int64_t pair = 0; pair < dim / 2; ++pair) {
    fetch_keys(chunk, 2 * pair);
    fetch_keys(chunk, 2 * pair + 1);
    __m512bh key[W];
    unroll<W>([&](int w) VLLM_INLINE { key[w] = chunk.key_pair(first + w * kLanes, pair); });
    unroll<R>([&](int r) VLLM_INLINE {
      const __m512bh value = (__m512bh)_mm512_set1_ps(q[r * dim + pair]);
      unroll<W>([&](int w) VLLM_INLINE { sums[r][w].v = _mm512_dpbf16_ps(sums[r][w].v, key[w], value); });
    });
  }
}

// sums[R][W vectors from dimension `first`] += weights values, two tokens at a time.
template <int R, int W, typename C>
inline void add_value_pairs(const C& chunk, const float* weights, int64_t dim, int64_t first, int from, int tokens, int n,
                            Vec (&sums)[R][W]) {
  for (int t = from / 2 * 2; t < tokens; t += 2) {
    fetch_value(chunk, t, dim, first);
    fetch_value(chunk, t + 1, dim, first);
    const uint32_t seen = (t < from ? 0u : 0xffffu) | (t + 1 < tokens ? 0xffff0000u : 0u);
    __m512bh value[W];
    chunk.template value_pairs<W>(t, dim, first, W > 1 ? kLanes : n, seen, value);
    unroll<R>([&](int r) VLLM_INLINE {
      const __m512bh weight = (__m512bh)_mm512_set1_ps(weights[r * kChunk + t / 2]);
      unroll<W>([&](int w) VLLM_INLINE { sums[r][w].v = _mm512_dpbf16_ps(sums[r][w].v, value[w], weight); });
    });
  }
}
#endif

// scores[R][W vectors from token `first`] = q k.
template <int R, int W, typename C>
void score_rows(const C& chunk, const float* q, float* scores, int64_t dim, int first) {
  Vec sums[R][W];
  unroll<R>([&](int r) VLLM_INLINE { unroll<W>([&](int w) VLLM_INLINE { sums[r][w] = zero(); }); });
  if constexpr (C::kInPairs) {
    add_key_pairs<R, W>(chunk, q, dim, first, sums);
  } else {
    for (int64_t d = 0; d < dim; ++d) {
      fetch_keys(chunk, d);
      Vec key[W];
      unroll<W>([&](int w) VLLM_INLINE { key[w] = load(chunk.key(first + w * kLanes) + d * chunk.key_stride); });
      unroll<R>([&](int r) VLLM_INLINE {
        const Vec value = set1(q[r * dim + d]);
        unroll<W>([&](int w) VLLM_INLINE { sums[r][w] = fma(value, key[w], sums[r][w]); });
      });
    }
  }
  unroll<R>([&](int r) VLLM_INLINE {
    unroll<W>([&](int w) VLLM_INLINE { store(scores + r * kChunk + first + w * kLanes, sums[r][w]); });
  });
}

// out[R][W vectors from dimension `first`] += weights[R][tokens from `from` on] values; `n` lanes of each vector exist.
// `fresh`: there is nothing in `out` yet.
template <int R, int W, typename C>
void add_values(const C& chunk, const float* weights, float* out, int64_t dim, int64_t first, int from, int tokens,
                int n, bool fresh) {
  // Whole vectors, but one that goes alone.
  const auto read = [&](const auto* from) VLLM_INLINE {
    if constexpr (W > 1) return load(from);
    return load_n(from, n);
  };
  Vec sums[R][W];
  unroll<R>([&](int r) VLLM_INLINE {
    unroll<W>([&](int w) VLLM_INLINE { sums[r][w] = zero(); });
  });
  if (!fresh) {
    unroll<R>([&](int r) VLLM_INLINE {
      unroll<W>([&](int w) VLLM_INLINE { sums[r][w] = read(out + r * dim + first + w * kLanes); });
    });
  }
  if constexpr (C::kInPairs) {
    add_value_pairs<R, W>(chunk, weights, dim, first, from, tokens, n, sums);
  } else {
    for (int t = from; t < tokens; ++t) {
      fetch_value(chunk, t, dim, first);
      Vec value[W];
      unroll<W>([&](int w) VLLM_INLINE { value[w] = read(chunk.value(t, dim) + first + w * kLanes); });
      unroll<R>([&](int r) VLLM_INLINE {
        const Vec weight = set1(weights[r * kChunk + t]);
        unroll<W>([&](int w) VLLM_INLINE { sums[r][w] = fma(weight, value[w], sums[r][w]); });
      });
    }
  }
  unroll<R>([&](int r) VLLM_INLINE {
    unroll<W>([&](int w) VLLM_INLINE {
      store_n(out + r * dim + first + w * kLanes, sums[r][w], W > 1 ? kLanes : n);
    });
  });
}

// These are functions of their own, for a chunk is much work and callers are many.
template <int R, typename C>
[[gnu::noinline]] void score_chunk(const C& chunk, const float* q, float* scores, int64_t dim, int tokens) {
  for (int first = 0; first < tokens;) {
    const int vectors = (tokens - first + kLanes - 1) / kLanes;
    // Three vectors take as long as four: one alone waits for its multiply-adds.
    if (kWide == 4 && vectors > 2) {
      score_rows<R, kWide>(chunk, q, scores, dim, first);
      first += kWide * kLanes;
    } else if (vectors >= 2) {
      score_rows<R, 2>(chunk, q, scores, dim, first);
      first += 2 * kLanes;
    } else {
      score_rows<R, 1>(chunk, q, scores, dim, first);
      first += kLanes;
    }
  }
}

template <int R, typename C>
[[gnu::noinline]] void add_chunk(const C& chunk, const float* weights, float* out, int64_t dim, int from, int tokens, bool fresh) {
  int64_t d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) {
    add_values<R, kWide>(chunk, weights, out, dim, d, from, tokens, kLanes, fresh);
  }
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    add_values<R, 2>(chunk, weights, out, dim, d, from, tokens, kLanes, fresh);
  }
  for (; d < dim; d += kLanes) {
    add_values<R, 1>(chunk, weights, out, dim, d, from, tokens, static_cast<int>(least(kLanes, dim - d)), fresh);
  }
}

// to[size] = from[size] * factor.
template <typename To, typename From>
inline void scale_into(To* to, const From* from, Vec factor, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(from + i) * factor);
  if (i == size) return;
  const int n = static_cast<int>(size - i);
  store_n(to + i, load_n(from + i, n) * factor, n);
}

// Before a chunk's weights: hides a row's scores outside of [from, valid), of those up to `tokens`, and moves the row's
// maximum if these scores are higher, after which shrink(factor) scales its sums. `factor` times the scores are in units of log2.
template <typename Shrink>
[[gnu::always_inline]] inline void raise_top(float* row, int from, int valid, int tokens, float factor, float* row_max, bool fresh,
                                             const Shrink& shrink) {
  for (int t = valid / kLanes * kLanes; t < tokens; t += kLanes) {
    const Mask in = lanes_below(valid - t > 0 ? static_cast<int>(least(kLanes, valid - t)) : 0);
    store(row + t, select(in, load(row + t), set1(-__builtin_inff())));
  }
  for (int t = 0; t < from; t += kLanes) {
    const Mask out_of_window = lanes_below(static_cast<int>(least(kLanes, from - t)));
    store(row + t, select(out_of_window, set1(-__builtin_inff()), load(row + t)));
  }
  Vec high = load(row);
  for (int t = kLanes; t < tokens; t += kLanes) high = max(high, load(row + t));
  high = high * set1(factor);
  if (fresh) {
    *row_max = reduce_max(high);
  } else if (any(gt(high, set1(*row_max + kLag)))) {
    const float greatest = reduce_max(high);
    const float factor_of_sums = first_lane(exp2(set1(*row_max - greatest)));
    *row_max = greatest;
    shrink(set1(factor_of_sums));
  }
}

// Turns R rows' scores, in units of log2, into weights, of each row those in [from[r], valid[r]); the others, up to
// `tokens`, become 0. `sums` are the rows' sums by lane. Rows go side by side: an exponential is a long chain of
// operations.
template <int R>
[[gnu::noinline]] void soften(float* scores, const int* from, const int* valid, int tokens, float* out, float* row_max,
                   float* sums, int64_t dim, bool fresh) {
  Vec top[R], total[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    total[r] = fresh ? zero() : load(sums + r * kLanes);
    raise_top(scores + r * kChunk, from[r], valid[r], tokens, 1.0f, row_max + r, fresh, [&](Vec shrink) VLLM_INLINE {
      total[r] = total[r] * shrink;
      scale_into(out + r * dim, out + r * dim, shrink, dim);
    });
    top[r] = set1(row_max[r]);
  }
  for (int t = 0; t < tokens; t += kLanes) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Vec weight = exp2(load(scores + r * kChunk + t) - top[r]);
      store(scores + r * kChunk + t, weight);
      total[r] = total[r] + weight;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) store(sums + r * kLanes, total[r]);
}

#if defined(__AVX512BF16__)
// 2^x with a relative error of 3e-6, for which bfloat16 has no place. NaN stays NaN. In fewer operations than exp2's: a sum with
// 1.5 * 2^23 is rounded to a whole number, whose last bits go into the exponent. For x of -126 and below that becomes 0, as the
// polynomial is below 1 there, and a number that is not normal becomes zero in bfloat16.
inline Vec exp2_of_weight(Vec x) {
  const Vec shift = set1(12582912.0f), clamped = max(set1(-126.0f), x), sum = clamped + shift;
  const Vec r = clamped - (sum - shift);
  Vec p = set1(9.57010191e-3f);
  p = fma(p, r, set1(5.59178603e-2f));
  p = fma(p, r, set1(2.40247448e-1f));
  p = fma(p, r, set1(6.93121815e-1f));
  p = fma(p, r, set1(9.99999261e-1f));
  const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(sum.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), power))};
}

// The same of `factor` times the scores, as words of weights rounded to bfloat16; `tokens` counts by 32. What is summed are
// the rounded ones: a weight's error is in its row's sum, too.
template <int R>
[[gnu::noinline]] void soften_pairs(float* scores, const int* from, const int* valid, int tokens, float factor, float* out,
                                    float* row_max, float* sums, int64_t dim, bool fresh) {
  Vec top[R], total[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    total[r] = fresh ? zero() : load(sums + r * kLanes);
    raise_top(scores + r * kChunk, from[r], valid[r], tokens, factor, row_max + r, fresh, [&](Vec shrink) VLLM_INLINE {
      total[r] = total[r] * shrink;
      scale_into(out + r * dim, out + r * dim, shrink, dim);
    });
    top[r] = set1(-row_max[r]);
  }
  for (int t = 0; t < tokens; t += kWeightsAtOnce) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const float* score = scores + r * kChunk + t;
      const Vec low = exp2_of_weight(fma(load(score), set1(factor), top[r]));
      const Vec high = exp2_of_weight(fma(load(score + kLanes), set1(factor), top[r]));
      const __m512bh weights = _mm512_cvtne2ps_pbh(high.v, low.v);
      total[r].v = _mm512_dpbf16_ps(total[r].v, weights, (__m512bh)_mm512_set1_epi32(0x3f803f80));
      _mm512_storeu_si512(scores + r * kChunk + t / 2, (__m512i)weights);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) store(sums + r * kLanes, total[r]);
}
#endif

// Soft-cap and ALiBi of one row's scores, in units of log2, of keys from `distance` (not above 0) from the query on.
// `cap` and `slope` are in units of log2; 0: none.
inline void adjust_scores(float* scores, int tokens, float cap, float slope, int64_t distance) {
  const Vec inverse = set1(cap > 0 ? 1.0f / cap : 0.0f), first = set1(static_cast<float>(distance)) + iota();
  for (int t = 0; t < tokens; t += kLanes) {
    Vec score = load(scores + t);
    if (cap > 0) score = tanh(score * inverse) * set1(cap);
    if (slope != 0) score = fma(set1(slope), first + set1(static_cast<float>(t)), score);
    store(scores + t, score);
  }
}

// Calls f with the number of rows as a constant.
template <int R, typename F>
inline void with_rows(int rows, const F& f) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, f);
  }
  f.template operator()<R>();
}

// Lets R rows attend a chunk of which they see tokens up to `tokens`, in `scores` [R][kChunk] to work in. Where it `adjusts`,
// adjust(scores, r, tokens) changes those of row r, in units of log2, which are `factor` times the products of pairs.
template <int R, typename C, typename Adjust>
void attend_chunk(const C& chunk, const float* q, int64_t dim, int64_t value_dim, const int* from, const int* valid, int tokens,
                  [[maybe_unused]] float factor, bool adjusts, const Adjust& adjust, float* scores, float* out, float* row_max,
                  float* sums, bool fresh) {
  score_chunk<R>(chunk, q, scores, dim, tokens);
  for (int r = 0; r < R && adjusts; ++r) {
    float* row = scores + r * kChunk;
    if constexpr (C::kInPairs) scale_into(row, row, set1(factor), tokens);
    adjust(row, r, tokens);
  }
  if constexpr (C::kInPairs) {
    const int all = static_cast<int>(round_up_weights(tokens));
    soften_pairs<R>(scores, from, valid, all, adjusts ? 1.0f : factor, out, row_max, sums, value_dim, fresh);
  } else {
    soften<R>(scores, from, valid, tokens, out, row_max, sums, value_dim, fresh);
  }
  add_chunk<R>(chunk, scores, out, value_dim, from[0], tokens, fresh);
}

// Adds a later part of the context to an earlier one of rows [row, end).
inline void merge_rows(const Partial& total, const Partial& part, int64_t row, int64_t end, int64_t dim) {
  for (; row < end; row += kLanes) {
    const int rows = static_cast<int>(least(kLanes, end - row));
    const auto read = [&](const float* from) VLLM_INLINE { return load_n(from + row, rows); };
    const Vec top = max(read(part.max), read(total.max));
    const Vec before = exp2(read(total.max) - top), after = exp2(read(part.max) - top);
    store_n(total.sum + row, read(total.sum) * before + read(part.sum) * after, rows);
    store_n(total.max + row, top, rows);
    float factors[2][kLanes];
    store(factors[0], before);
    store(factors[1], after);
    for (int r = 0; r < rows; ++r) {
      float* out = total.out + (row + r) * dim;
      const float* add = part.out + (row + r) * dim;
      for (int64_t d = 0; d < dim; d += kLanes) {
        const int n = static_cast<int>(least(kLanes, dim - d));
        store_n(out + d, fma(load_n(add + d, n), set1(factors[1][r]), load_n(out + d, n) * set1(factors[0][r])), n);
      }
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
