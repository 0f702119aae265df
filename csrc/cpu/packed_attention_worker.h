// packed_attention's kernels share this file: how texts are cut into items, and where rows gather what they have attended. How
// rows attend a chunk is a kernel's own: see PackedWorker.
//
// Include only from kernels/*.cpp.
#pragma once

#include "attention_tile.h"
#include "kernels_encoder.h"
#include "transpose.h"

namespace vllm_cpu {
namespace VLLM_ISA {

// Rows of an item at most, whose queries and sums stay in the second-level cache.
constexpr int64_t kItemRows = 256;
constexpr int64_t kItemsPerThread = 4;

inline int64_t greatest(int64_t a, int64_t b) { return a < b ? b : a; }

struct Item {
  int64_t start, seen;    // of the text, and how many of its keys are seen
  int64_t first, tokens;  // of its tokens, those whose queries these are
  int64_t head;           // of keys
};

// How texts are cut into items.
class Items {
 public:
  Items(const PackedAttentionArgs& a, int64_t most_tokens)
      : args_(a), most_tokens_(most_tokens), first_(a.texts + 1) {
    first_[0] = 0;
    for (int64_t text = 0; text < a.texts; ++text) first_[text + 1] = first_[text] + parts(text) * a.k.num_heads;
  }

  int64_t count() const { return first_[args_.texts]; }

  Item at(int64_t index) const {
    int64_t text = 0;
    for (int64_t end = args_.texts; end - text > 1;) {
      const int64_t middle = (text + end) / 2;
      (first_[middle] <= index ? text : end) = middle;
    }
    const int64_t within = index - first_[text], length = length_of(text), all = parts(text);
    const int64_t part = within / args_.k.num_heads, first = length * part / all;
    const int64_t tokens = length * (part + 1) / all - first, seen = args_.seen ? args_.seen[text] : length;
    return {args_.starts[text], seen, first, tokens, within % args_.k.num_heads};
  }

 private:
  int64_t length_of(int64_t text) const { return args_.starts[text + 1] - args_.starts[text]; }
  int64_t parts(int64_t text) const { return (length_of(text) + most_tokens_ - 1) / most_tokens_; }

  const PackedAttentionArgs& args_;
  const int64_t most_tokens_;
  Scratch<int64_t> first_;
};

// kLanes tokens' values, whose addresses `at` gives, to [width][kChunk]; tokens from `tokens` on become zeros.
template <typename At>
inline void transpose_tokens(const At& at, int64_t tokens, int64_t width, float* to) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const int n = static_cast<int>(least(kLanes, width - d));
    Vec rows[kLanes];
    unroll<kLanes>([&](int t) VLLM_INLINE { rows[t] = t < tokens ? load_n(at(t) + d, n) : zero(); });
    transpose(rows);
    unroll<kLanes>([&](auto i) VLLM_INLINE {
      if (i < n) store(to + (d + i) * kChunk, rows[i]);
    });
  }
}

// The rows of an item of T. `own` floats in front of their memory are for the kernel that attends.
template <typename T>
class ItemRows {
 protected:
  ItemRows(const PackedAttentionArgs& a, int64_t group, int64_t most_rows, int64_t own)
      : a_(a), group_(group), dim_(a.head_dim), memory_(own + most_rows * (dim_ + kLanes + 1)), own_(memory_.get()) {
    float* at = own_ + own;
    const auto take = [&](int64_t size) { return (at += size) - size; };
    sums_ = take(most_rows * kLanes);
    out_ = take(most_rows * dim_);
    max_ = take(most_rows);
  }

  // Take floats of the kernel's memory.
  float* take(int64_t size) { return (own_ += size) - size; }

  // Scores are scaled for exp2: exp(x) = 2^(x log2 e).
  float factor() const { return a_.scale * 1.44269504f; }

  const T* of_token(const Heads& heads, int64_t token, int64_t head) const {
    return static_cast<const T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
  }

  // No row has seen anything.
  void clear(const Item& item) {
    const int64_t rows = item.tokens * group_;
    for (int64_t i = 0; i < rows * dim_; ++i) out_[i] = 0.0f;
    for (int64_t i = 0; i < rows * kLanes; ++i) sums_[i] = 0.0f;
    for (int64_t i = 0; i < rows; ++i) max_[i] = -__builtin_inff();
  }

#if defined(__AVX512BF16__)
  // Brings the chunk at `start`, of `tokens` tokens, into words; zeros are beside their values.
  void pack_pairs(const Item& item, int64_t start, int64_t tokens, const WidePairChunk& to) const {
    const int64_t first = item.start + start;
    for (int64_t t = 0; t < tokens; t += kLanes) {
      const auto words = [&](int64_t i) { return reinterpret_cast<const float*>(of_token(a_.k, first + t + i, item.head)); };
      transpose_tokens(words, tokens - t, dim_ / 2, reinterpret_cast<float*>(to.keys) + t);
    }
    to.pack_values(0, round_up_weights(tokens), dim_, [&](int64_t t) VLLM_INLINE {
      return t < tokens ? of_token(a_.v, first + t, item.head) : nullptr;
    });
  }
#endif

  // Whether rows have no sums yet when they come to the chunk at `start`.
  bool is_fresh(int64_t start) const { return !a_.windowed && start == 0; }

  // The rows that see some of the chunk at `start`.
  int64_t first_row(const Item& item, int64_t start) const {
    return a_.windowed ? greatest(start - a_.right - item.first, 0) * group_ : 0;
  }
  int64_t end_row(const Item& item, int64_t start) const {
    if (!a_.windowed) return item.tokens * group_;
    return least(least(start + kChunk, item.seen) + a_.left - item.first, item.tokens) * group_;
  }

  // Find the tokens of the chunk that `rows` rows from `row` on see, from[r] to valid[r] of it; up to which one sees any.
  int find_seen(const Item& item, int64_t start, int64_t row, int rows, int* from, int* valid) const {
    for (int r = 0; r < rows; ++r) {
      const int64_t position = item.first + (row + r) / group_;
      from[r] = a_.windowed ? static_cast<int>(greatest(position - a_.left - start, 0)) : 0;
      valid[r] = static_cast<int>(least(least(item.seen, position + a_.right + 1) - start, kChunk));
    }
    return valid[rows - 1];
  }

  bool adjusts() const { return a_.softcap > 0 || a_.alibi_slopes; }

  // Soft-cap and ALiBi of a row's scores, in units of log2.
  void adjust(const Item& item, int64_t row, int64_t start, int tokens, float* scores) const {
    if (a_.softcap > 0) adjust_scores(scores, tokens, a_.softcap * 1.44269504f, 0, 0);
    if (!a_.alibi_slopes) return;
    const Vec slope = set1(a_.alibi_slopes[item.head * group_ + row % group_] * -1.44269504f);
    const Vec first = set1(static_cast<float>(start - item.first - row / group_)) + iota();
    for (int t = 0; t < tokens; t += kLanes) {
      const Vec distance = first + set1(static_cast<float>(t));
      store(scores + t, fma(slope, max(distance, zero() - distance), load(scores + t)));
    }
  }

  void write_rows(const Item& item) const {
    T* out = static_cast<T*>(a_.out);
    for (int64_t row = 0; row < item.tokens * group_; ++row) {
      const int64_t token = item.start + item.first + row / group_, head = item.head * group_ + row % group_;
      const float sum = reduce_sum(load(sums_ + row * kLanes));
      // Zeros for a row that sees no key.
      const Vec factor = set1(sum == 0 ? 0.0f : 1.0f / sum);
      scale_into(out + (token * a_.q.num_heads + head) * dim_, out_ + row * dim_, factor, dim_);
    }
  }

  const PackedAttentionArgs& a_;
  const int64_t group_, dim_;
  Scratch<float> memory_;
  float *own_, *sums_, *out_, *max_;
};

// A thread's work on items. Rows, an ItemRows, attend them: read_row(row, q) takes a row's query, pack(item, start, tokens)
// a chunk's keys and values, and attend_rows(item, start) lets all rows that see it attend it.
template <typename Rows>
class PackedWorker : Rows {
 public:
  PackedWorker(const PackedAttentionArgs& a, int64_t group, int64_t most_rows) : Rows(a, group, most_rows) {}

  void attend(const Item& item) {
    const PackedAttentionArgs& a = this->a_;
    int64_t row = 0;
    for (int64_t token = item.start + item.first; token < item.start + item.first + item.tokens; ++token) {
      for (int64_t each = 0; each < this->group_; ++each, ++row) {
        this->read_row(row, this->of_token(a.q, token, item.head * this->group_ + each));
      }
    }
    if (a.windowed || item.seen == 0) this->clear(item);
    const int64_t begin = greatest(item.first - a.left, 0) / kChunk * kChunk;
    const int64_t end = least(item.first + item.tokens + a.right, item.seen);
    for (int64_t start = begin; start < end; start += kChunk) {
      this->pack(item, start, least(kChunk, item.seen - start));
      this->attend_rows(item, start);
    }
    this->write_rows(item);
  }
};

// Items of as few rows as keep all threads busy, but of `least_rows`.
template <typename Rows>
void run_items(const PackedAttentionArgs& a, int64_t least_rows) {
  const int64_t group = a.q.num_heads / a.k.num_heads, rows = a.starts[a.texts] * group;
  const int64_t wanted = rows * a.k.num_heads / (kItemsPerThread * max_threads());
  const int64_t most_tokens = greatest(least(kItemRows, greatest(wanted, least_rows)) / group, 1);
  const Items items(a, most_tokens);
  Shares shares(items.count());
#pragma omp parallel if (items.count() > 1)
  {
    PackedWorker<Rows> worker(a, group, most_tokens * group);
    int64_t turn = 0;
    for (int64_t item = shares.claim(&turn); item < items.count(); item = shares.claim(&turn)) {
      worker.attend(items.at(item));
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
