// latent_attention of bfloat16 over a cache of bfloat16 by matrix tiles (see tile_attention.h), few rows as many. Others attend
// as on the levels below.
#include "../latent_attention_worker.h"
#include "../tile_attention.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

class LatentTiles : protected TileRows {
 public:
  using Value = BF16;
  using Cached = BF16;

 protected:
  LatentTiles(const AttentionArgs& a, const Plan& plan)
      : TileRows(a, plan, own_size(a, plan)), inner_(tile_inner(a.head_dim)) {
    keys_ = take(inner_ / 2 * kChunk);
    chunk_.keys = reinterpret_cast<uint32_t*>(keys_);
    chunk_.values = reinterpret_cast<uint32_t*>(take(kChunk / 2 * value_dim_));
    scores_ = take(kTileRows * kChunk);
    q_ = reinterpret_cast<BF16*>(take(plan.most_rows * inner_ / 2));
    // Values beyond head_dim stay zero.
    std::memset(keys_, 0, inner_ / 2 * kChunk * sizeof(float));
    std::memset(q_, 0, plan.most_rows * inner_ * sizeof(BF16));
  }

  void read_part(int64_t row, int64_t at, const BF16* q, int64_t size) {
    std::memcpy(q_ + row * inner_ + at, q, size * sizeof(BF16));
  }

  template <typename RowOf>
  void attend(const Step& step, int64_t count, const RowOf& row_of) {
    pack(count, row_of);
    const Partial to = target(step);
    const bool fresh = is_fresh(step);
    const int64_t end = end_row(step);
    for (int64_t row = first_row(step); row < end; row += kTileRows) {
      const int rows = static_cast<int>(least(kTileRows, end - row));
      int from[kTileRows], valid[kTileRows];
      const int tokens = find_seen(step, row, rows, from, valid);
      tiles_.attend(chunk_, q_ + row * inner_, rows, inner_, value_dim_, from, valid, tokens, factor(), false,
                    [](float*, int, int) {}, scores_, to.out + row * value_dim_, to.max + row, sums_ + row * kLanes, fresh);
    }
  }

 private:
  static int64_t own_size(const AttentionArgs& a, const Plan& plan) {
    return (kChunk + plan.most_rows) * tile_inner(a.head_dim) / 2 + kChunk / 2 * a.value_dim + kTileRows * kChunk;
  }

  template <typename RowOf>
  void pack(int64_t count, const RowOf& row_of) {
    const BF16* rows[kChunk];
    for (int64_t t = 0; t < kChunk; ++t) rows[t] = row_of(least(t, count - 1));
    for (int64_t begin = 0; begin < count; begin += kLanes) {
      const BF16* some[kLanes];
      std::memcpy(some, rows + begin, sizeof(some));
      turn_pairs(some, dim_, keys_ + begin);
    }
    chunk_.pack_values(0, round_up_weights(count), value_dim_, [&](int64_t t) VLLM_INLINE { return t < count ? rows[t] : nullptr; });
  }

  const int64_t inner_;
  float *keys_, *scores_;
  WidePairChunk chunk_;
  BF16* q_;
  AttentionTiles tiles_;
};

}  // namespace

void latent_attention(const LatentAttentionArgs& a) {
  if (a.dtype != DType::bf16 || a.cache_dtype != CacheDType::same || a.head_dim % 2 || a.value_dim % kTileRows) {
    return avx512_fp16::latent_attention(a);
  }
  with_plan(a, kMostLatentRows, kTileRows, [&](const Plan& plan) { run_plan<BF16, LatentWorker<LatentTiles>>(a, plan); });
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
