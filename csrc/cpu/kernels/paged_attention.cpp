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
#include "../attention_rows.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int64_t kTileRows = 192;

// The steps of a thread's items. T: the dtype of queries and results; C is what the cache holds.
template <typename T, typename C, bool kDots>
class Worker : TileRows {
  using Near = typename ChunksOf<C, kDots>::Near;
  using Wide = typename ChunksOf<C, kDots>::Wide;

 public:
  Worker(const AttentionArgs& a, const Plan& plan) : TileRows(a, plan) {
    wide_.keys = reinterpret_cast<decltype(wide_.keys)>(keys_);
    wide_.values = values_;
    if constexpr (kDots) wide_.scale = factor();
  }

  // Takes items from `claim` until there are none. The next one is known in time to fetch its first chunk.
  template <typename Claim>
  void run(const Claim& claim) {
    Step step = first_step(a_, plan_, claim());
    if (!step.tile) return;
    Near chunks[2];
    if constexpr (kDots) chunks[0].scale = chunks[1].scale = factor();
    Near* chunk = &chunks[0];
    find_chunk(step, chunk);
    read_queries(step);
    if (a_.window) clear_segment(step);
    while (step.tile) {
      Step next = next_step(a_, plan_, step);
      const bool done = !next.tile;
      if (done) next = first_step(a_, plan_, claim());
      Near* other = chunk == &chunks[0] ? &chunks[1] : &chunks[0];
      chunk->next = next.tile ? other : chunk;
      if (next.tile) find_chunk(next, other);
      attend(step, *chunk);
      const bool ends = done || next.start / kSegment != step.start / kSegment;
      if (ends) end_segment(step);
      if (done && !plan_.partials) write_rows<T>(a_, plan_, *step.tile, step.head, total_);
      if (done && next.tile) read_queries(next);
      if (ends && next.tile && a_.window) clear_segment(next);
      step = next;
      chunk = other;
    }
  }

 private:
  void read_queries(const Step& step) {
    const Vec scale = set1(factor());
    for (int64_t i = step.tile->first_member; i < step.tile->first_member + step.tile->members; ++i) {
      const Member& member = plan_.members[i];
      const int64_t first = a_.query_start_loc[member.request] + member.first;
      int64_t row = member.row;
      for (int64_t token = 0; token < member.tokens; ++token) {
        const T* q = static_cast<const T*>(a_.q.data) + (first + token) * a_.q.token_stride +
                     step.head * plan_.group * a_.q.head_stride;
        for (int64_t each = 0; each < plan_.group; ++each, ++row, q += a_.q.head_stride) {
          if constexpr (kDots) {
            std::memcpy(q_ + row * dim_, q, dim_ * sizeof(T));
          } else {
            scale_into(q_ + row * dim_, q, scale, dim_);
          }
          last_[row] = member.position + token;
        }
      }
    }
  }

  // Tokens from the member's end on are never used: they point at the first of the chunk.
  void find_chunk(const Step& step, Near* chunk) const {
    const Member& member = member_of(step);
    const int32_t* blocks = a_.block_table + member.request * a_.table_stride;
    const int64_t end = member.end(), cell = dim_ * a_.block_size, seen = first_token(step);
    const uint32_t size = static_cast<uint32_t>(a_.block_size);
    chunk->key_stride = a_.block_size;
    for (int run = 0; run < kRuns; ++run) {
      int64_t at_token = step.start + (step.start + run * kRun < end ? run * kRun : 0);
      // Of runs before the window the scores are dropped and the values not read: any run of the request will do.
      if (at_token + kRun <= seen) at_token = seen / kRun * kRun;
      const uint32_t token = static_cast<uint32_t>(greatest(at_token, runs_are_whole() ? 0 : seen));
      const int64_t at = (blocks[token / size] * a_.num_kv_heads + step.head) * cell, offset = token % size;
      chunk->keys[run] = static_cast<const C*>(a_.k_cache) + at + offset;
      chunk->values[run] = static_cast<const C*>(a_.v_cache) + at + offset * dim_;
    }
  }

  // A run may cross blocks whose size is no multiple of 16.
  bool runs_are_whole() const { return a_.block_size % kRun == 0; }

  void widen(const Step& step, const Near& chunk) {
    const int64_t count = least(kChunk, member_of(step).end() - step.start);
    const int64_t seen = greatest(first_token(step) - step.start, 0);
    if (runs_are_whole()) {
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
    const int64_t token = step.start + t, block = token / a_.block_size, offset = token % a_.block_size;
    const int64_t id = a_.block_table[member_of(step).request * a_.table_stride + block];
    const int64_t cell = (id * a_.num_kv_heads + step.head) * dim_ * a_.block_size;
    const C* key = static_cast<const C*>(a_.k_cache) + cell + offset;
    const C* value = static_cast<const C*>(a_.v_cache) + cell + offset * dim_;
    for (int64_t d = 0; d < dim_; ++d) {
      if constexpr (kDots) {
        std::memcpy(reinterpret_cast<C*>(wide_.keys + d / 2 * kChunk + t) + d % 2, key + d * a_.block_size, sizeof(C));
      } else {
        wide_.keys[d * kChunk + t] = first_lane(load_n(key + d * a_.block_size, 1));
      }
      wide_.values[t * dim_ + d] = first_lane(load_n(value + d, 1));
    }
  }

  void attend(const Step& step, const Near& chunk) {
    const Member& first = member_of(step);
    const Member& last = *(&first + step.members - 1);
    const int64_t row = first_seeing(plan_, first, step.start);
    const int64_t end = last_seeing(a_, plan_, last, step.start + kChunk);
    if (runs_are_whole() && end - row <= kRows) {
      attend_rows(step, chunk, row, end);
    } else {
      widen(step, chunk);
      attend_rows(step, wide_, row, end);
    }
  }

  Wide wide_;
};

template <typename T>
void attend_all(const AttentionArgs& a) {
  with_plan(a, kTileRows, [&](const Plan& plan) {
#if defined(__AVX512BF16__)
    if constexpr (__is_same(T, BF16)) {
      if (a.dots) return run_plan<BF16, Worker<BF16, BF16, true>>(a, plan);
    }
#endif
    switch (a.cache_dtype) {
      case CacheDType::same:
        return run_plan<T, Worker<T, T, false>>(a, plan);
      case CacheDType::e4m3:
        return run_plan<T, Worker<T, E4M3, false>>(a, plan);
      case CacheDType::e5m2:
        return run_plan<T, Worker<T, E5M2, false>>(a, plan);
    }
  });
}

}  // namespace

void paged_attention(const AttentionArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, attend_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
