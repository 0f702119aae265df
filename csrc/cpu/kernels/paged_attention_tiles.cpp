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
      : TileRows(a, plan, own_size(a, plan)), inner_(tile_inner(a.head_dim)) {
    chunk_.keys = reinterpret_cast<uint32_t*>(take(inner_ / 2 * kChunk));
    chunk_.values = reinterpret_cast<uint32_t*>(take(kChunk / 2 * dim_));
    scores_ = take(kTileRows * kChunk);
    q_ = reinterpret_cast<BF16*>(take(plan.most_rows * inner_ / 2));
    // Values beyond head_dim stay zero.
    std::memset(chunk_.keys, 0, inner_ / 2 * kChunk * sizeof(uint32_t));
    std::memset(q_, 0, plan.most_rows * inner_ * sizeof(BF16));
  }

  void read_row(int64_t row, const BF16* q) { std::memcpy(q_ + row * inner_, q, dim_ * sizeof(BF16)); }

  void attend(const Step& step, const Near& chunk) {
    // Tokens that no row of the step sees have no values, whatever lies there.
    const Member& member = member_of(step);
    const int64_t seen = greatest(first_token(step) - step.start, 0), count = least(kChunk, member.end() - step.start);
    int64_t row = first_row(step);
    const int64_t end = end_row(step), tiles = (end - row + kTileRows - 1) / kTileRows;
    const bool few = end - row <= kFewRows && runs_are_whole(a_);
    // Shared out over few tiles, the next chunk's fetches would come all at once.
    const bool early = tiles < kTilesToFetchBeside;
    if (!few) pack_pairs(a_, member.request, step, seen, count, chunk, chunk_, early);
    const Partial to = target(step);
    const bool fresh = is_fresh(step);
    for (int64_t tile = 0; tile < tiles; ++tile, row += kTileRows) {
      if (!early) chunk.fetch_next(tile, tiles, dim_);
      const int rows = static_cast<int>(least(kTileRows, end - row));
      int from[kTileRows], valid[kTileRows];
      const int tokens = find_seen(step, row, rows, from, valid);
      const auto adjusted = [&](float* scores, int64_t r, int count) VLLM_INLINE { adjust(step, row + r, count, scores); };
      const BF16* q = q_ + row * inner_;
      float *out = to.out + row * dim_, *row_max = to.max + row, *sums = sums_ + row * kLanes;
      if (few) {
        with_rows<kFewRows>(rows, [&]<int R>() {
          attend_few<R>(chunk, q, inner_, dim_, from, valid, tokens, seen, count, factor(), adjusts(), adjusted, scores_, out,
                        row_max, sums, fresh);
        });
      } else {
        tiles_.attend(chunk_, q, rows, inner_, dim_, from, valid, tokens, factor(), adjusts(), adjusted, scores_, out, row_max,
                      sums, fresh);
      }
    }
  }

 private:
  static constexpr int64_t kTilesToFetchBeside = 4;
  // Up to so many rows attend without tiles: see attend_few.
  static constexpr int kFewRows = 4;

  static int64_t own_size(const AttentionArgs& a, const Plan& plan) {
    return (kChunk + plan.most_rows) * tile_inner(a.head_dim) / 2 + kChunk / 2 * a.head_dim + kTileRows * kChunk;
  }

  const int64_t inner_;
  WidePairChunk chunk_;
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
