// paged_attention's kernels share this file: where chunks lie, and a thread's way through its items. How rows attend a chunk is
// a kernel's own: see Worker.
//
// Include only from kernels/*.cpp.
#pragma once

#include <cstring>

#include "attention_rows.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Rows of a tile at most: twice as many rows as short share a chunk's words, and stay in the second-level cache as well.
inline int64_t most_rows_of(const AttentionArgs& a) { return a.head_dim <= 64 ? 384 : 192; }

// A run may cross blocks whose size is no multiple of 16.
inline bool runs_are_whole(const AttentionArgs& a) { return a.block_size % kRun == 0; }

// A token's key, whose values are block_size apart, and its value.
template <typename C>
void find_token(const AttentionArgs& a, int64_t request, int64_t head, int64_t token, const C** key, const C** value) {
  const int64_t block = token / a.block_size, offset = token % a.block_size;
  const int64_t cell = (a.block_table[request * a.table_stride + block] * a.num_kv_heads + head) * a.head_dim * a.block_size;
  *key = static_cast<const C*>(a.k_cache) + cell + offset;
  *value = static_cast<const C*>(a.v_cache) + cell + offset * a.head_dim;
}

#if defined(__AVX512BF16__)
// Brings a step's chunk into words, of the tokens from `seen` to `count` that some row sees; zeros are beside their values.
// `fetches` the next chunk meanwhile.
inline void pack_pairs(const AttentionArgs& a, int64_t request, const Step& step, int64_t seen, int64_t count,
                       const PairChunk& chunk, const WidePairChunk& to, bool fetches) {
  const int64_t dim = a.head_dim;
  if (!runs_are_whole(a)) {
    std::memset(to.values, 0, kChunk / 2 * dim * sizeof(uint32_t));
    for (int64_t t = seen; t < count; ++t) {
      const BF16 *key, *value;
      find_token(a, request, step.head, step.start + t, &key, &value);
      BF16* keys = reinterpret_cast<BF16*>(to.keys + t);
      BF16* values = reinterpret_cast<BF16*>(to.values + t / 2 * dim) + t % 2;
      for (int64_t d = 0; d < dim; ++d) {
        keys[d / 2 * 2 * kChunk + d % 2] = key[d * a.block_size];
        values[2 * d] = value[d];
      }
    }
    return;
  }
  for (int64_t begin = seen / kRun * kRun; begin < count; begin += kRun) {
    for (int64_t pair = 0; pair < dim / 2; ++pair) {
      if (fetches) chunk.fetch_next_pair(static_cast<int>(begin / kRun), pair);
      _mm512_storeu_si512(to.keys + pair * kChunk + begin, (__m512i)chunk.key_pair(static_cast<int>(begin), pair));
    }
  }
  to.pack_values(seen / kWeightsAtOnce * kWeightsAtOnce, round_up_weights(count), dim, [&](int64_t t) VLLM_INLINE {
    return t < seen || t >= count ? nullptr : chunk.value(static_cast<int>(t), dim);
  });
}
#endif

// The steps of a thread's items. Rows, TileRows, attend them: with `Value`, the dtype of queries and results, `Cached`, that of
// the cache, and `Near`, a chunk as it lies there; read_row(row, q) takes a row's query, and attend(step, chunk) lets all rows
// that see the step's chunk attend it.
template <typename Rows>
class Worker : Rows {
  using T = typename Rows::Value;
  using Near = typename Rows::Near;
  using C = typename Rows::Cached;

 public:
  Worker(const AttentionArgs& a, const Plan& plan) : Rows(a, plan) {}

  // Takes items from `claim` until there are none. The next one is known in time to fetch its first chunk.
  template <typename Claim>
  void run(const Claim& claim) {
    const AttentionArgs& a = this->a_;
    const Plan& plan = this->plan_;
    Step step = first_step(a, plan, claim());
    if (!step.tile) return;
    Near chunks[2]{};
    Near* chunk = &chunks[0];
    find_chunk(step, chunk);
    read_queries(step);
    if (a.window) this->clear_segment(step);
    while (step.tile) {
      Step next = next_step(a, plan, step);
      const bool done = !next.tile;
      if (done) next = first_step(a, plan, claim());
      Near* other = chunk == &chunks[0] ? &chunks[1] : &chunks[0];
      chunk->next = next.tile ? other : chunk;
      if (next.tile) find_chunk(next, other);
      this->attend(step, *chunk);
      const bool ends = done || next.start / kSegment != step.start / kSegment;
      if (ends) this->end_segment(step);
      if (done && !plan.partials) write_rows<T>(a, plan, *step.tile, step.head, this->total_);
      if (done && next.tile) read_queries(next);
      if (ends && next.tile && a.window) this->clear_segment(next);
      step = next;
      chunk = other;
    }
  }

 private:
  // Tokens from the member's end on are never used: they point at the first of the chunk.
  void find_chunk(const Step& step, Near* chunk) const {
    const AttentionArgs& a = this->a_;
    const Member& member = this->member_of(step);
    const int32_t* blocks = a.block_table + member.request * a.table_stride;
    const int64_t end = member.end(), cell = a.head_dim * a.block_size, seen = this->first_token(step);
    const uint32_t size = static_cast<uint32_t>(a.block_size);
    chunk->key_stride = a.block_size;
    for (int run = 0; run < kRuns; ++run) {
      int64_t at_token = step.start + (step.start + run * kRun < end ? run * kRun : 0);
      // Runs before the window have their scores dropped and their values not read: any run of the request will do.
      if (at_token + kRun <= seen) at_token = seen / kRun * kRun;
      const uint32_t token = static_cast<uint32_t>(greatest(at_token, runs_are_whole(a) ? 0 : seen));
      const int64_t at = (blocks[token / size] * a.num_kv_heads + step.head) * cell, offset = token % size;
      chunk->keys[run] = static_cast<const C*>(a.k_cache) + at + offset;
      chunk->values[run] = static_cast<const C*>(a.v_cache) + at + offset * a.head_dim;
    }
  }

  void read_queries(const Step& step) {
    const AttentionArgs& a = this->a_;
    const int64_t group = this->plan_.group;
    for (int64_t i = step.tile->first_member; i < step.tile->first_member + step.tile->members; ++i) {
      const Member& member = this->plan_.members[i];
      const int64_t first = a.query_start_loc[member.request] + member.first;
      int64_t row = member.row;
      for (int64_t token = 0; token < member.tokens; ++token) {
        const T* q = static_cast<const T*>(a.q.data) + (first + token) * a.q.token_stride + step.head * group * a.q.head_stride;
        for (int64_t each = 0; each < group; ++each, ++row, q += a.q.head_stride) {
          this->read_row(row, q);
          this->last_[row] = member.position + token;
        }
      }
    }
  }
};

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
