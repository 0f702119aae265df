// Attention of ragged queries over the paged cache, causal, float32 inside.
//
// A row is one query head of one token. A tile is the rows, up to a few dozen, that read one key head: consecutive
// tokens of one request, or of several requests that begin with the same blocks, over which their rows go together.
// The context passes in chunks of 64 tokens, whose scores, softmax and weighted values stay in the first-level cache,
// and in segments of 256 tokens, which are attended apart and merged in order. Chunks and segments are counted from
// the sequence's start, so a row's result does not depend on how queries were tiled, chunked or batched, nor on
// whether one thread attended all segments or several threads shared them.
//
// Few rows read the cache as it lies, and each chunk while the one before is computed, because memory is what they
// wait for. Many rows have it widened to float32 first, and share that. Where the CPU has fast dot products of bfloat16
// (see attention_tile.h), keys are put in pairs instead.
//
// With a window, chunks and segments that no row of a tile sees are skipped, and of the blocks before a tile's first
// visible token neither table entries nor contents are read: they may belong to others by now. Chunks are still counted
// from the sequence's start, so skipping changes no bits. Rows of a tile begin to see at different chunks: their sums
// start from nothing at each segment. Requests share no chunks then, since their windows begin at different tokens.
#include "../paged_attention_worker.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

// T: the dtype of queries and results; C is what the cache holds.
template <typename T, typename C, bool kDots>
class CachedRows : protected VectorRows {
 public:
  using Value = T;
  using Cached = C;
  using Near = typename ChunksOf<C, kDots>::Near;

 protected:
  CachedRows(const AttentionArgs& a, const Plan& plan) : VectorRows(a, plan) {
    wide_.keys = reinterpret_cast<decltype(wide_.keys)>(keys_);
    wide_.values = values_;
    if constexpr (kDots) wide_.scale = factor();
  }

  Near near() const {
    Near chunk{};
    if constexpr (kDots) chunk.scale = factor();
    return chunk;
  }

  void read_row(int64_t row, const T* q) {
    if constexpr (kDots) {
      std::memcpy(q_ + row * dim_, q, dim_ * sizeof(T));
    } else {
      scale_into(q_ + row * dim_, q, set1(factor()), dim_);
    }
  }

  void attend(const Step& step, const Near& chunk) {
    const int64_t row = first_row(step), end = end_row(step);
    if (runs_are_whole(a_) && end - row <= kRows) {
      attend_rows(step, chunk, row, end);
    } else {
      widen(step, chunk);
      attend_rows(step, wide_, row, end);
    }
  }

 private:
  void widen(const Step& step, const Near& chunk) {
    const int64_t count = least(kChunk, member_of(step).end() - step.start);
    const int64_t seen = greatest(first_token(step) - step.start, 0);
    if (runs_are_whole(a_)) {
      for (int64_t begin = seen / kRun * kRun; begin < count; begin += kRun) {
        widen_run(chunk, begin, least(kRun, count - begin));
      }
    } else {
      for (int64_t t = seen; t < count; ++t) widen_token(step, t);
    }
  }

  void widen_keys(const Near& chunk, int64_t begin) {
    const C *keys = chunk.keys[begin / kRun], *next = chunk.next->keys[begin / kRun];
    for (int64_t d = 0; d < dim_; ++d) {
      __builtin_prefetch(next + d * a_.block_size, 0, 2);
      if constexpr (kDots) {
        if (d % 2) continue;
        const auto pairs = chunk.key_pair(static_cast<int>(begin), d / 2);
        std::memcpy(wide_.keys + d / 2 * kChunk + begin, &pairs, sizeof(pairs));
      } else {
        for (int t = 0; t < kRun; t += kLanes) {
          store(wide_.keys + d * kChunk + begin + t, load(keys + d * a_.block_size + t));
        }
      }
    }
  }

  void widen_run(const Near& chunk, int64_t begin, int64_t tokens) {
    const C *values = chunk.values[begin / kRun], *next_values = chunk.next->values[begin / kRun];
    widen_keys(chunk, begin);
    float* to = wide_.values + begin * dim_;
    const int64_t size = tokens * dim_;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      __builtin_prefetch(next_values + i, 0, 2);
      store(to + i, load(values + i));
    }
    if (i < size) store_n(to + i, load_n(values + i, size - i), size - i);
  }

  void widen_token(const Step& step, int64_t t) {
    const C *key, *value;
    find_token(a_, member_of(step).request, step.head, step.start + t, &key, &value);
    for (int64_t d = 0; d < dim_; ++d) {
      if constexpr (kDots) {
        std::memcpy(reinterpret_cast<C*>(wide_.keys + d / 2 * kChunk + t) + d % 2, key + d * a_.block_size, sizeof(C));
      } else {
        wide_.keys[d * kChunk + t] = first_lane(load_n(key + d * a_.block_size, 1));
      }
      wide_.values[t * dim_ + d] = first_lane(load_n(value + d, 1));
    }
  }

  typename ChunksOf<C, kDots>::Wide wide_;
};

template <typename T>
void attend_all(const AttentionArgs& a) {
  with_plan(a, kMostRows, kRows, [&](const Plan& plan) {
#if defined(__AVX512BF16__)
    if constexpr (__is_same(T, BF16)) {
      if (a.dots) return run_plan<BF16, Worker<CachedRows<BF16, BF16, true>>>(a, plan);
    }
#endif
    switch (a.cache_dtype) {
      case CacheDType::same:
        return run_plan<T, Worker<CachedRows<T, T, false>>>(a, plan);
      case CacheDType::e4m3:
        return run_plan<T, Worker<CachedRows<T, E4M3, false>>>(a, plan);
      case CacheDType::e5m2:
        return run_plan<T, Worker<CachedRows<T, E5M2, false>>>(a, plan);
    }
  });
}

}  // namespace

void paged_attention(const AttentionArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, attend_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu

