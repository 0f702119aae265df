// paged_attention of bfloat16 over a cache of bfloat16 by matrix tiles (see tile_attention.h), or by what gives the same bits.
// Other dtypes attend as on the levels below.
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
  using Near = PairChunk;

 protected:
  MatrixRows(const AttentionArgs& a, const Plan& plan)
      : TileRows(a, plan, own_size(a, plan)), inner_(tile_inner(a.head_dim)), tiles_(a.head_dim) {
    chunk_.keys = reinterpret_cast<uint32_t*>(take(inner_ / 2 * kChunk));
    chunk_.values = reinterpret_cast<uint32_t*>(take(kChunk / 2 * dim_));
    scores_ = take(kFewRows * kChunk);
    q_ = reinterpret_cast<BF16*>(take(query_rows(plan.most_rows) * inner_ / 2));
    // Values beyond head_dim stay zero.
    std::memset(chunk_.keys, 0, inner_ / 2 * kChunk * sizeof(uint32_t));
    std::memset(q_, 0, query_rows(plan.most_rows) * inner_ * sizeof(BF16));
  }

  void read_row(int64_t row, const BF16* q) { std::memcpy(q_ + row * inner_, q, dim_ * sizeof(BF16)); }

  void attend(const Step& step, const Near& chunk) {
    // Tokens that no row of the step sees have no values, whatever lies there.
    const Member& member = member_of(step);
    const int64_t seen = greatest(first_token(step) - step.start, 0), count = least(kChunk, member.end() - step.start);
    const int64_t row = first_row(step), rows = end_row(step) - row;
    const Partial to = target(step);
    const StepRows all{q_ + row * inner_, inner_, dim_, to.out + row * dim_, to.max + row, sums_ + row * kLanes, is_fresh(step)};
    const auto find = [&](int64_t r, int some, int* from, int* valid) VLLM_INLINE {
      return find_seen(step, row + r, some, from, valid);
    };
    const auto adjusted = [&](int64_t r, float* scores, int tokens) VLLM_INLINE { adjust(step, row + r, tokens, scores); };
    if (rows > 0 && rows <= kFewRows && runs_are_whole(a_)) {
      int from[kFewRows], valid[kFewRows];
      const int tokens = find(0, static_cast<int>(rows), from, valid);
      with_rows<kFewRows>(static_cast<int>(rows), [&]<int R>() {
        attend_few<R>(chunk, all.q, inner_, dim_, from, valid, tokens, seen, count, factor(), adjusts(),
                      [&](float* scores, int r, int some) VLLM_INLINE { adjusted(r, scores, some); }, scores_, all.out, all.row_max,
                      all.sums, all.fresh);
      });
      return;
    }
    // Shared out over few blocks, the next chunk's fetches would come all at once.
    const bool early = rows <= (kBlocksToFetchBeside - 1) * kTileRows;
    pack_pairs(a_, member.request, step, seen, count, chunk, chunk_, early);
    const auto before = [&](int64_t block, int64_t blocks) VLLM_INLINE {
      if (!early) chunk.fetch_next(block, blocks, dim_);
    };
    tiles_.attend(chunk_, all, rows, find, before, factor(), adjusts(), adjusted);
  }

 private:
  static constexpr int64_t kBlocksToFetchBeside = 4;
  // Up to so many rows attend without tiles: see attend_few.
  static constexpr int kFewRows = 4;

  static int64_t own_size(const AttentionArgs& a, const Plan& plan) {
    return (kChunk + query_rows(plan.most_rows)) * tile_inner(a.head_dim) / 2 + kChunk / 2 * a.head_dim + kFewRows * kChunk;
  }

  const int64_t inner_;
  WidePairChunk chunk_;
  float* scores_;
  BF16* q_;
  AttentionTiles tiles_;
  const Flushing flushing_;
};

}  // namespace

void paged_attention(const AttentionArgs& a) {
  if (a.dtype != DType::bf16 || a.cache_dtype != CacheDType::same || a.head_dim % kTileRows) {
    return avx512_fp16::paged_attention(a);
  }
  with_plan(a, most_rows_of(a), kTileRows, [&](const Plan& plan) { run_plan<BF16, Worker<MatrixRows>>(a, plan); });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
