// Attention among the tokens of each of several texts that follow one another, before and after them, float32 inside.
//
// A row is one query head of one token. An item is the rows of neighbouring tokens of a text that read one key head.
// Keys and values pass in chunks of 64 tokens, counted from the text's start, which an item brings into the layout of
// attention_tile.h: keys transposed, or in pairs for dot products of bfloat16, values in float32. A row's numbers are
// those of its own chain of operations over the chunks that it sees: they depend neither on the other texts nor on how
// a text is cut into items.
#include "../attention_tile.h"
#include "../kernels_encoder.h"
#include "../transpose.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

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

// A thread's memory, and what it does with items.
template <typename T, bool kDots>
class Worker {
  using Packed = typename ChunksOf<T, kDots>::Wide;

 public:
  Worker(const PackedAttentionArgs& a, int64_t group, int64_t most_rows)
      : a_(a),
        group_(group),
        dim_(a.head_dim),
        memory_(2 * kChunk * dim_ + kRows * kChunk + most_rows * (2 * dim_ + kLanes + 1)) {
    float* at = memory_.get();
    const auto take = [&](int64_t size) { return (at += size) - size; };
    keys_ = take(kChunk * dim_);
    chunk_.keys = reinterpret_cast<decltype(chunk_.keys)>(keys_);
    if constexpr (kDots) chunk_.scale = factor();
    chunk_.values = take(kChunk * dim_);
    scores_ = take(kRows * kChunk);
    sums_ = take(most_rows * kLanes);
    q_ = take(most_rows * dim_);
    out_ = take(most_rows * dim_);
    max_ = take(most_rows);
  }

  void attend(const Item& item) {
    read_queries(item);
    if (a_.windowed || item.seen == 0) clear(item);
    const int64_t begin = greatest(item.first - a_.left, 0) / kChunk * kChunk;
    const int64_t end = least(item.first + item.tokens + a_.right, item.seen);
    for (int64_t start = begin; start < end; start += kChunk) {
      pack(item, start, least(kChunk, item.seen - start));
      attend_rows(item, start);
    }
    write_rows(item);
  }

 private:
  // Of the scores: exp(x) = 2^(x log2 e).
  float factor() const { return a_.scale * 1.44269504f; }

  const T* of_token(const Heads& heads, int64_t token, int64_t head) const {
    return static_cast<const T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
  }

  void read_queries(const Item& item) {
    float* row = q_;
    for (int64_t token = item.start + item.first; token < item.start + item.first + item.tokens; ++token) {
      for (int64_t each = 0; each < group_; ++each, row += dim_) {
        const T* q = of_token(a_.q, token, item.head * group_ + each);
        if constexpr (kDots) {
          std::memcpy(row, q, dim_ * sizeof(T));
        } else {
          scale_into(row, q, set1(factor()), dim_);
        }
      }
    }
  }

  // No row has seen anything.
  void clear(const Item& item) {
    const int64_t rows = item.tokens * group_;
    for (int64_t i = 0; i < rows * dim_; ++i) out_[i] = 0.0f;
    for (int64_t i = 0; i < rows * kLanes; ++i) sums_[i] = 0.0f;
    for (int64_t i = 0; i < rows; ++i) max_[i] = -__builtin_inff();
  }

  // The chunk at `start`, of `tokens` tokens.
  void pack(const Item& item, int64_t start, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t += kLanes) {
      const auto key = [&](int64_t i) { return of_token(a_.k, item.start + start + t + i, item.head); };
      if constexpr (kDots) {
        // Two neighbours of a key are a word.
        const auto words = [&](int64_t i) { return reinterpret_cast<const float*>(key(i)); };
        transpose_tokens(words, tokens - t, dim_ / 2, keys_ + t);
      } else {
        transpose_tokens(key, tokens - t, dim_, keys_ + t);
      }
    }
    for (int64_t t = 0; t < tokens; ++t) {
      scale_into(chunk_.values + t * dim_, of_token(a_.v, item.start + start + t, item.head), set1(1.0f), dim_);
    }
  }

  void attend_rows(const Item& item, int64_t start) {
    // Of the tokens' queries, those that see the chunk.
    int64_t row = 0, end = item.tokens;
    if (a_.windowed) {
      row = greatest(start - a_.right - item.first, 0);
      end = least(least(start + kChunk, item.seen) + a_.left - item.first, end);
    }
    const bool fresh = !a_.windowed && start == 0;
    for (row *= group_, end *= group_; row < end; row += kRows) {
      const int rows = static_cast<int>(least(kRows, end - row));
      int from[kRows] = {}, valid[kRows];
      for (int r = 0; r < rows; ++r) {
        const int64_t position = item.first + (row + r) / group_;
        if (a_.windowed) from[r] = static_cast<int>(greatest(position - a_.left - start, 0));
        valid[r] = static_cast<int>(least(least(item.seen, position + a_.right + 1) - start, kChunk));
      }
      const int tokens = valid[rows - 1];
      float* out = out_ + row * dim_;
      with_rows<kRows>(rows, [&]<int R>() {
        score_chunk<R>(chunk_, q_ + row * dim_, scores_, dim_, tokens);
        for (int r = 0; r < R; ++r) adjust(item, row + r, start, tokens, scores_ + r * kChunk);
        soften<R>(scores_, from, valid, tokens, out, max_ + row, sums_ + row * kLanes, dim_, fresh);
        add_chunk<R>(chunk_, scores_, out, dim_, from[0], tokens, fresh);
      });
    }
  }

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
  Packed chunk_;
  float *keys_, *scores_, *sums_, *q_, *out_, *max_;
};

template <typename T, bool kDots>
void run_items(const PackedAttentionArgs& a) {
  const int64_t group = a.q.num_heads / a.k.num_heads, rows = a.starts[a.texts] * group;
  // Few rows are cut small enough to keep all threads busy.
  const int64_t wanted = rows * a.k.num_heads / (kItemsPerThread * max_threads());
  const int64_t most_tokens = greatest(least(kItemRows, greatest(wanted, kRows)) / group, 1);
  const Items items(a, most_tokens);
  Shares shares(items.count());
#pragma omp parallel if (items.count() > 1)
  {
    Worker<T, kDots> worker(a, group, most_tokens * group);
    int64_t turn = 0;
    for (int64_t item = shares.claim(&turn); item < items.count(); item = shares.claim(&turn)) {
      worker.attend(items.at(item));
    }
  }
}

template <typename T>
void attend_all(const PackedAttentionArgs& a) {
#if defined(__AVX512BF16__)
  if constexpr (__is_same(T, BF16)) {
    if (a.dots) return run_items<T, true>(a);
  }
#endif
  run_items<T, false>(a);
}

}  // namespace

void packed_attention(const PackedAttentionArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, attend_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
