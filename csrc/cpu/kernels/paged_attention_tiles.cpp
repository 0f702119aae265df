// paged_attention of bfloat16 over a cache of bfloat16 by matrix tiles (see tile_attention.h), few rows as many. Others attend
// as on the levels below.
//
// A chunk is brought into the layout of right tiles once for all rows that share it, which takes about one row's time.
#include "../paged_attention_worker.h"
#include "../tile_attention.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

class MatrixRows : protected TileRows {
 public:
  using Value = BF16;
  using Cached = BF16;
  using Near = Chunk<BF16>;

 protected:
  MatrixRows(const AttentionArgs& a, const Plan& plan)
      : TileRows(a, plan, own_size(a, plan)), inner_(tile_inner(a.head_dim)) {
    chunk_.keys = reinterpret_cast<uint32_t*>(take(inner_ / 2 * kChunk));
    chunk_.values = reinterpret_cast<uint32_t*>(take(kChunk / 2 * dim_));
    scores_ = take(kTileRows * kChunk);
    q_ = reinterpret_cast<BF16*>(take(plan.most_rows * inner_ / 2));
    // Values beyond head_dim stay zero.
    std::memset(chunk_.keys, 0, inner_ / 2 * kChunk * sizeof(uint32_t));
    std::memset(q_, 0, plan.most_rows * inner_ * sizeof(BF16));
  }

  Near near() const { return {}; }

  void read_row(int64_t row, const BF16* q) { std::memcpy(q_ + row * inner_, q, dim_ * sizeof(BF16)); }

  void attend(const Step& step, const Near& chunk) {
    pack(step, chunk);
    const Partial to = target(step);
    const bool fresh = is_fresh(step);
    const int64_t end = end_row(step);
    for (int64_t row = first_row(step); row < end; row += kTileRows) {
      const int rows = static_cast<int>(least(kTileRows, end - row));
      int from[kTileRows], valid[kTileRows];
      const int tokens = find_seen(step, row, rows, from, valid);
      const auto adjusted = [&](float* scores, int64_t r, int count) VLLM_INLINE { adjust(step, row + r, count, scores); };
      tiles_.attend(chunk_, q_ + row * inner_, rows, inner_, dim_, from, valid, tokens, factor(), adjusts(), adjusted, scores_,
                    to.out + row * dim_, to.max + row, sums_ + row * kLanes, fresh);
    }
  }

 private:
  static int64_t own_size(const AttentionArgs& a, const Plan& plan) {
    return (kChunk + plan.most_rows) * tile_inner(a.head_dim) / 2 + kChunk / 2 * a.head_dim + kTileRows * kChunk;
  }

  // Tokens that no row of the step sees have no values, whatever lies there.
  void pack(const Step& step, const Near& chunk) {
    const int64_t count = least(kChunk, member_of(step).end() - step.start);
    const int64_t seen = greatest(first_token(step) - step.start, 0);
    if (!runs_are_whole(a_)) return pack_tokens(step, seen, count);
    for (int64_t begin = seen / kRun * kRun; begin < count; begin += kRun) pack_keys(chunk, begin);
    for (int64_t begin = seen / kTileTokens * kTileTokens; begin < count; begin += kTileTokens) {
      pack_values(chunk_, begin, dim_, [&](int64_t t) VLLM_INLINE -> const BF16* {
        const int token = static_cast<int>(begin + t);
        fetch_value(chunk, token);
        return token < seen || token >= count ? nullptr : chunk.value(token, dim_);
      });
    }
  }

  void pack_keys(const Near& chunk, int64_t begin) {
    const BF16 *keys = chunk.keys[begin / kRun], *next = chunk.next->keys[begin / kRun];
    const int64_t stride = a_.block_size;
    uint32_t* to = chunk_.keys + begin;
    for (int64_t d = 0; d < dim_; d += 2, to += kChunk, keys += 2 * stride, next += 2 * stride) {
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + stride, 0, 2);
      _mm512_storeu_si512(to, stride == kRun ? pairs_of_neighbours(keys) : pairs_of(keys, keys + stride));
    }
  }

  void fetch_value(const Near& chunk, int token) const {
    const BF16* value = chunk.next->value(token, dim_);
    for (int64_t d = 0; d < dim_; d += kTileInner) __builtin_prefetch(value + d, 0, 2);
  }

  void pack_tokens(const Step& step, int64_t seen, int64_t count) {
    std::memset(chunk_.values, 0, kChunk / 2 * dim_ * sizeof(uint32_t));
    for (int64_t t = seen; t < count; ++t) {
      const BF16 *key, *value;
      find_token(a_, member_of(step).request, step.head, step.start + t, &key, &value);
      BF16 *keys = reinterpret_cast<BF16*>(chunk_.keys + t), *values = chunk_.value(t, dim_);
      for (int64_t d = 0; d < dim_; ++d) {
        keys[d / 2 * 2 * kChunk + d % 2] = key[d * a_.block_size];
        values[2 * d] = value[d];
      }
    }
  }

  const int64_t inner_;
  TileChunk chunk_;
  float* scores_;
  BF16* q_;
  AttentionTiles tiles_;
};

}  // namespace

void paged_attention(const AttentionArgs& a) {
  if (a.dtype != DType::bf16 || a.cache_dtype != CacheDType::same || a.head_dim % kTileRows) {
    return avx512_fp16::paged_attention(a);
  }
  with_plan(a, kMostRows, kTileRows, [&](const Plan& plan) { run_plan<BF16, Worker<MatrixRows>>(a, plan); });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
