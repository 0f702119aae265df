// Attention of ragged queries over the paged cache, causal, float32 inside.
//
// A row is one query head of one token. A tile is the rows, up to a few hundred, that read one key head: consecutive
// tokens of one request, or of several requests that begin with the same blocks, over which their rows go together.
// The context passes in chunks of 64 tokens, whose scores, softmax and weighted values stay in the first-level cache,
// and in segments of 256 tokens, which are attended apart and merged in order. Chunks and segments are counted from
// the sequence's start, so a row's result does not depend on how queries were tiled, chunked or batched, nor on
// whether one thread attended all segments or several threads shared them.
//
// Few rows read the cache as it lies, and many have it widened to float32 first, and share that; each chunk is fetched while
// the one before is computed, because memory is what they wait for. Where the CPU has fast dot products of bfloat16 (see
// attention_tile.h), keys and values are put in pairs instead.
//
// With a window, chunks and segments that no row of a tile sees are skipped, and of the blocks before a tile's first
// visible token neither table entries nor contents are read: they may belong to others by now. Chunks are still counted
// from the sequence's start, so skipping changes no bits. Rows of a tile begin to see at different chunks: their sums
// start from nothing at each segment. Requests share no chunks then, since their windows begin at different tokens.
#include "../paged_attention_worker.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

class PagedRows : protected VectorRows {
 protected:
  using VectorRows::VectorRows;

  // Few rows attend the chunk as it lies, many one that widen(seen, count) makes of its tokens from `seen` to `count`.
  template <typename Near, typename Wide, typename Widen>
  void attend_either(const Step& step, const Near& chunk, const Wide& wide, const Widen& widen) {
    const int64_t row = first_row(step), end = end_row(step);
    if (runs_are_whole(a_) && end - row <= kRows) return attend_rows(step, chunk, row, end, [](int64_t, int64_t) {});
    widen(greatest(first_token(step) - step.start, 0), least(kChunk, member_of(step).end() - step.start));
    attend_rows(step, wide, row, end, [&](int64_t part, int64_t parts) VLLM_INLINE { chunk.fetch_next(part, parts, dim_); });
  }
};

// T: the dtype of queries and results; C is what the cache holds.
template <typename T, typename C>
class CachedRows : protected PagedRows {
 public:
  using Value = T;
  using Cached = C;
  using Near = Chunk<C>;

 protected:
  CachedRows(const AttentionArgs& a, const Plan& plan) : PagedRows(a, plan), wide_{keys_, values_} {}

  void read_row(int64_t row, const T* q) { scale_into(q_ + row * dim_, q, set1(factor()), dim_); }

  void attend(const Step& step, const Near& chunk) {
    attend_either(step, chunk, wide_, [&](int64_t seen, int64_t count) { widen(step, seen, count, chunk); });
  }

 private:
  void widen(const Step& step, int64_t seen, int64_t count, const Near& chunk) {
    if (!runs_are_whole(a_)) {
      for (int64_t t = seen; t < count; ++t) widen_token(step, t);
      return;
    }
    for (int64_t begin = seen / kRun * kRun; begin < count; begin += kRun) {
      const C* keys = chunk.keys[begin / kRun];
      for (int64_t d = 0; d < dim_; ++d) {
        for (int t = 0; t < kRun; t += kLanes) {
          store(wide_.keys + d * kChunk + begin + t, load(keys + d * a_.block_size + t));
        }
      }
      scale_into(wide_.values + begin * dim_, chunk.values[begin / kRun], set1(1.0f), least(kRun, count - begin) * dim_);
    }
  }

  void widen_token(const Step& step, int64_t t) {
    const C *key, *value;
    find_token(a_, member_of(step).request, step.head, step.start + t, &key, &value);
    for (int64_t d = 0; d < dim_; ++d) {
      wide_.keys[d * kChunk + t] = first_lane(load_n(key + d * a_.block_size, 1));
      wide_.values[t * dim_ + d] = first_lane(load_n(value + d, 1));
    }
  }

  WideChunk wide_;
};

#if defined(__AVX512BF16__)
// By dot products of bfloat16.
class PairRows : protected PagedRows {
 public:
  using Value = BF16;
  using Cached = BF16;
  using Near = PairChunk;

 protected:
  PairRows(const AttentionArgs& a, const Plan& plan)
      : PagedRows(a, plan), wide_{reinterpret_cast<uint32_t*>(keys_), reinterpret_cast<uint32_t*>(values_)} {}

  void read_row(int64_t row, const BF16* q) { std::memcpy(q_ + row * dim_, q, dim_ * sizeof(BF16)); }

  void attend(const Step& step, const Near& chunk) {
    attend_either(step, chunk, wide_, [&](int64_t seen, int64_t count) {
      pack_pairs(a_, member_of(step).request, step, seen, count, chunk, wide_, false);
    });
  }

 private:
  WidePairChunk wide_;
};
#endif

template <typename T>
void attend_all(const AttentionArgs& a) {
  with_plan(a, most_rows_of(a), kRows, [&](const Plan& plan) {
#if defined(__AVX512BF16__)
    if constexpr (__is_same(T, BF16)) {
      if (a.dots) return run_plan<BF16, Worker<PairRows>>(a, plan);
    }
#endif
    switch (a.cache_dtype) {
      case CacheDType::same:
        return run_plan<T, Worker<CachedRows<T, T>>>(a, plan);
      case CacheDType::e4m3:
        return run_plan<T, Worker<CachedRows<T, E4M3>>>(a, plan);
      case CacheDType::e5m2:
        return run_plan<T, Worker<CachedRows<T, E5M2>>>(a, plan);
    }
  });
}

}  // namespace

void paged_attention(const AttentionArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, attend_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu

