// packed_attention of bfloat16 by matrix tiles (see tile_attention.h). Others attend as on the levels below.
#include "../packed_attention_worker.h"
#include "../tile_attention.h"

#if defined(VLLM_HAS_TILES)
namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

class MatrixRows : public ItemRows<BF16> {
 protected:
  MatrixRows(const PackedAttentionArgs& a, int64_t group, int64_t most_rows)
      : ItemRows(a, group, most_rows,
                 (kChunk + query_rows(most_rows)) * tile_inner(a.head_dim) / 2 + kChunk / 2 * a.head_dim),
        inner_(tile_inner(a.head_dim)),
        tiles_(a.head_dim) {
    chunk_.keys = reinterpret_cast<uint32_t*>(take(inner_ / 2 * kChunk));
    chunk_.values = reinterpret_cast<uint32_t*>(take(kChunk / 2 * dim_));
    q_ = reinterpret_cast<BF16*>(take(query_rows(most_rows) * inner_ / 2));
    // Values beyond head_dim stay zero.
    std::memset(chunk_.keys, 0, inner_ / 2 * kChunk * sizeof(uint32_t));
    std::memset(q_, 0, query_rows(most_rows) * inner_ * sizeof(BF16));
  }

  void read_row(int64_t row, const BF16* q) { std::memcpy(q_ + row * inner_, q, dim_ * sizeof(BF16)); }

  void pack(const Item& item, int64_t start, int64_t tokens) { pack_pairs(item, start, tokens, chunk_); }

  void attend_rows(const Item& item, int64_t start) {
    const int64_t row = first_row(item, start);
    const StepRows all{q_ + row * inner_, inner_, dim_, out_ + row * dim_, max_ + row, sums_ + row * kLanes, is_fresh(start)};
    const auto find = [&](int64_t r, int some, int* from, int* valid) VLLM_INLINE {
      return find_seen(item, start, row + r, some, from, valid);
    };
    const auto adjusted = [&](int64_t r, float* scores, int tokens) VLLM_INLINE { adjust(item, row + r, start, tokens, scores); };
    tiles_.attend(chunk_, all, end_row(item, start) - row, find, [](int64_t, int64_t) {}, factor(), adjusts(), adjusted);
  }

 private:
  const int64_t inner_;
  WidePairChunk chunk_;
  BF16* q_;
  AttentionTiles tiles_;
  const Flushing flushing_;
};

}  // namespace

void packed_attention(const PackedAttentionArgs& a) {
  if (a.dtype != DType::bf16 || a.head_dim % kTileRows) return avx512_fp16::packed_attention(a);
  run_items<MatrixRows>(a, kTileRows);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
#endif
