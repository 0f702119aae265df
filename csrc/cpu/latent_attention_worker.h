// latent_attention's kernels share this file. The attention is causal, with float32 inside; a row of the cache is a token's key
// for all heads, and its first part the token's value.
//
// It is paged_attention.cpp's way through tiles, chunks and segments, and has what is said there of a row's bits. Heads
// are taken in groups, each as if it had a key head of its own.
//
// Include only from kernels/*.cpp.
#pragma once

#include <cstring>

#include "attention_rows.h"
#include "transpose.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Rows of a tile at most: more of these long ones would leave the second-level cache between two chunks.
constexpr int64_t kMostLatentRows = 96;

// The steps of a thread's items. Rows, TileRows, attend them: with `Value`, the dtype of queries and results, and `Cached`,
// that of the cache; read_part(row, at, q, size) takes a part of a row's query, and attend(step, count, row_of) lets all rows
// that see the step's chunk attend its first `count` tokens, of which row_of(t) is the cache's row.
template <typename Rows>
class LatentWorker : Rows {
  using T = typename Rows::Value;
  using C = typename Rows::Cached;

 public:
  LatentWorker(const LatentAttentionArgs& a, const Plan& plan) : Rows(a, plan), args_(a) {}

  // Takes items from `claim` until there are none.
  template <typename Claim>
  void run(const Claim& claim) {
    const Plan& plan = this->plan_;
    for (Step step = first_step(args_, plan, claim()); step.tile; step = first_step(args_, plan, claim())) {
      read_queries(step);
      for (Step next; step.tile; step = next) {
        next = next_step(args_, plan, step);
        // A chunk of several members lies before the queries of all.
        const int64_t count = least(kChunk, this->member_of(step).end() - step.start);
        this->attend(step, count, [&](int64_t t) VLLM_INLINE { return row_of(step, t); });
        if (!next.tile || next.start / kSegment != step.start / kSegment) this->end_segment(step);
        if (!next.tile && !plan.partials) write_rows<T>(args_, plan, *step.tile, step.head, this->total_);
      }
    }
  }

 private:
  // A row's query is that for the latent, then the rotated one.
  void read_queries(const Step& step) {
    const Plan& plan = this->plan_;
    for (int64_t i = step.tile->first_member; i < step.tile->first_member + step.tile->members; ++i) {
      const Member& member = plan.members[i];
      const int64_t first = args_.query_start_loc[member.request] + member.first, head = step.head * plan.group;
      int64_t row = member.row;
      for (int64_t token = 0; token < member.tokens; ++token) {
        for (int64_t each = 0; each < plan.group; ++each, ++row) {
          read_part(row, 0, args_.q, this->value_dim_, first + token, head + each);
          read_part(row, this->value_dim_, args_.q_rope, this->dim_ - this->value_dim_, first + token, head + each);
          this->last_[row] = member.position + token;
        }
      }
    }
  }

  void read_part(int64_t row, int64_t at, const Heads& heads, int64_t size, int64_t token, int64_t head) {
    const T* q = static_cast<const T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
    Rows::read_part(row, at, q, size);
  }

  const C* row_of(const Step& step, int64_t t) const {
    const int64_t token = step.start + t;
    const int32_t* blocks = args_.block_table + this->member_of(step).request * args_.table_stride;
    return static_cast<const C*>(args_.k_cache) +
           (blocks[token / args_.block_size] * args_.block_size + token % args_.block_size) * this->dim_;
  }

  const LatentAttentionArgs& args_;
};

// Rows of kLanes tokens as `width` rows of neighbouring tokens, kChunk floats apart.
template <typename From>
void turn_rows(const From* const (&rows)[kLanes], int64_t width, float* to) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const int n = static_cast<int>(least(kLanes, width - d));
    Vec square[kLanes];
    unroll<kLanes>([&](int t) VLLM_INLINE { square[t] = n == kLanes ? load(rows[t] + d) : load_n(rows[t] + d, n); });
    transpose(square);
    if (n == kLanes) {
      unroll<kLanes>([&](int i) VLLM_INLINE { store(to + (d + i) * kChunk, square[i]); });
    } else {
      for (int i = 0; i < n; ++i) store(to + (d + i) * kChunk, square[i]);
    }
  }
}

// The same of pairs, two dimensions as one value of 32 bits.
inline void turn_pairs(const BF16* const (&rows)[kLanes], int64_t dim, float* to) {
  const float* pairs[kLanes];
  for (int t = 0; t < kLanes; ++t) pairs[t] = reinterpret_cast<const float*>(rows[t]);
  turn_rows(pairs, dim / 2, to);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
