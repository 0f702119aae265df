// Attention among the tokens of each of several texts that follow one another, before and after them, float32 inside.
//
// A row is one query head of one token. An item is the rows of neighbouring tokens of a text that read one key head.
// Keys and values pass in chunks of 64 tokens, counted from the text's start, which an item brings into the layout of
// attention_tile.h: keys transposed and values in float32, or both in pairs for dot products of bfloat16. A row's numbers are
// those of its own chain of operations over the chunks that it sees: they depend neither on the other texts nor on how
// a text is cut into items.
#include "../packed_attention_worker.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

template <typename T, bool kDots>
class VectorRows : public ItemRows<T> {
  using Base = ItemRows<T>;

 protected:
  using Base::a_, Base::dim_, Base::factor, Base::of_token;

  VectorRows(const PackedAttentionArgs& a, int64_t group, int64_t most_rows)
      : Base(a, group, most_rows, (2 * kChunk + most_rows) * a.head_dim + kRows * kChunk) {
    keys_ = this->take(kChunk * dim_);
    chunk_.keys = reinterpret_cast<decltype(chunk_.keys)>(keys_);
    chunk_.values = reinterpret_cast<decltype(chunk_.values)>(this->take(kChunk * dim_));
    scores_ = this->take(kRows * kChunk);
    q_ = this->take(most_rows * dim_);
  }

  void read_row(int64_t row, const T* q) {
    if constexpr (kDots) {
      std::memcpy(q_ + row * dim_, q, dim_ * sizeof(T));
    } else {
      scale_into(q_ + row * dim_, q, set1(factor()), dim_);
    }
  }

  void pack(const Item& item, int64_t start, int64_t tokens) {
    if constexpr (kDots) {
      this->pack_pairs(item, start, tokens, chunk_);
    } else {
      for (int64_t t = 0; t < tokens; t += kLanes) {
        const auto key = [&](int64_t i) { return of_token(a_.k, item.start + start + t + i, item.head); };
        transpose_tokens(key, tokens - t, dim_, keys_ + t);
      }
      for (int64_t t = 0; t < tokens; ++t) {
        scale_into(chunk_.values + t * dim_, of_token(a_.v, item.start + start + t, item.head), set1(1.0f), dim_);
      }
    }
  }

  void attend_rows(const Item& item, int64_t start) {
    const int64_t end = this->end_row(item, start);
    const bool fresh = this->is_fresh(start);
    for (int64_t row = this->first_row(item, start); row < end; row += kRows) {
      const int rows = static_cast<int>(least(kRows, end - row));
      int from[kRows], valid[kRows];
      const int tokens = this->find_seen(item, start, row, rows, from, valid);
      const auto adjusted = [&](float* scores, int64_t r, int count) VLLM_INLINE { this->adjust(item, row + r, start, count, scores); };
      with_rows<kRows>(rows, [&]<int R>() {
        attend_chunk<R>(chunk_, q_ + row * dim_, dim_, dim_, from, valid, tokens, factor(), this->adjusts(), adjusted, scores_,
                        this->out_ + row * dim_, this->max_ + row, this->sums_ + row * kLanes, fresh);
      });
    }
  }

 private:
  WideChunkOf<kDots> chunk_;
  float *keys_, *scores_, *q_;
};

template <typename T>
void attend_all(const PackedAttentionArgs& a) {
#if defined(__AVX512BF16__)
  if constexpr (__is_same(T, BF16)) {
    if (a.dots) return run_items<VectorRows<T, true>>(a, kRows);
  }
#endif
  run_items<VectorRows<T, false>>(a, kRows);
}

}  // namespace

void packed_attention(const PackedAttentionArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, attend_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu

