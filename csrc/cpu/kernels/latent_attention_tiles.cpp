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
      : TileRows(a, plan, own_size(a, plan)), inner_(tile_inner(a.head_dim)), tiles_(a.value_dim) {
    keys_ = take(inner_ / 2 * kChunk);
    chunk_.keys = reinterpret_cast<uint32_t*>(keys_);
    chunk_.values = reinterpret_cast<uint32_t*>(take(kChunk / 2 * value_dim_));
    q_ = reinterpret_cast<BF16*>(take(query_rows(plan.most_rows) * inner_ / 2));
    // Values beyond head_dim stay zero.
    std::memset(keys_, 0, inner_ / 2 * kChunk * sizeof(float));
    std::memset(q_, 0, query_rows(plan.most_rows) * inner_ * sizeof(BF16));
  }

  void read_part(int64_t row, int64_t at, const BF16* q, int64_t size) {
    std::memcpy(q_ + row * inner_ + at, q, size * sizeof(BF16));
  }

  template <typename RowOf>
  void attend(const Step& step, int64_t count, const RowOf& row_of) {
    pack(count, row_of);
    const Partial to = target(step);
    const int64_t row = first_row(step);
    const StepRows all{q_ + row * inner_,  inner_, value_dim_, to.out + row * value_dim_, to.max + row, sums_ + row * kLanes,
                       is_fresh(step)};
    const auto find = [&](int64_t r, int some, int* from, int* valid) VLLM_INLINE {
      return find_seen(step, row + r, some, from, valid);
    };
    tiles_.attend(chunk_, all, end_row(step) - row, find, [](int64_t, int64_t) {}, factor(), false, [](int64_t, float*, int) {});
  }

 private:
  static int64_t own_size(const AttentionArgs& a, const Plan& plan) {
    return (kChunk + query_rows(plan.most_rows)) * tile_inner(a.head_dim) / 2 + kChunk / 2 * a.value_dim;
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
  float* keys_;
  WidePairChunk chunk_;
  BF16* q_;
  AttentionTiles tiles_;
  const Flushing flushing_;
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
