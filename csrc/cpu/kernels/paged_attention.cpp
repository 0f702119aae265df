// Attention of ragged queries over the paged cache, causal, float32 inside.
//
// A row is one query head of one token. A tile is the rows, up to a few dozen, that read one key head: consecutive
// tokens of one request, or of several requests that begin with the same blocks, over which their rows go together.
// The context passes in chunks of 64 tokens, whose scores, softmax and weighted values stay in the first-level cache,
// and in segments of 256 tokens, which are attended apart and merged in order. Chunks and segments are counted from
// the sequence's start, so a row's result does not depend on how queries were tiled, chunked or batched, nor on
// whether one thread attended all segments or several threads shared them.
//
// Few rows read the cache as it lies, and each chunk while the one before is computed, because memory is what they
// wait for. Many rows have it widened to float32 first, and share that. Where the CPU has fast dot products of bfloat16
// (see attention_tile.h), keys are put in pairs instead.
//
// With a window, chunks and segments that no row of a tile sees are skipped, and of the blocks before a tile's first
// visible token neither table entries nor contents are read: they may belong to others by now. Chunks are still counted
// from the sequence's start, so skipping changes no bits. Rows of a tile begin to see at different chunks: their sums
// start from nothing at each segment. Requests share no chunks then, since their windows begin at different tokens.
#include <algorithm>
#include <initializer_list>

#include "../attention_plan.h"
#include "../attention_tile.h"
#include "../kernels.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

constexpr int64_t kTileRows = 192;
constexpr int64_t kItemsPerThread = 4;

// Where an item that is one segment leaves its rows.
Partial partial_of(const AttentionArgs& a, const Plan& plan, int64_t item) {
  const int64_t index = find_tile(plan, &item), rows = plan.tiles[index].rows;
  float* at = plan.partials + plan.first_partial[index] + item * rows * (a.head_dim + 2);
  return {at, at + rows * a.head_dim, at + rows * (a.head_dim + 1)};
}

// The first row of a member that sees the token at `start`.
int64_t first_seeing(const Plan& plan, const Member& member, int64_t start) {
  const int64_t past = greatest(start - member.position, 0);
  return member.row + least(past, member.tokens) * plan.group;
}

// The row after the last one of a member that sees a token before `end`.
int64_t last_seeing(const AttentionArgs& a, const Plan& plan, const Member& member, int64_t end) {
  int64_t tokens = member.tokens;
  if (a.window) tokens = least(tokens, greatest(end + a.window - 1 - member.position, 0));
  return member.row + tokens * plan.group;
}

void merge_segment(const AttentionArgs& a, const Plan& plan, const Tile& tile, int64_t start, const Partial& total,
                   const Partial& part) {
  for (int64_t i = tile.first_member; i < tile.first_member + tile.members; ++i) {
    const Member& member = plan.members[i];
    const int64_t end = last_seeing(a, plan, member, start + kSegment);
    for (int64_t row = first_seeing(plan, member, start); row < end; ++row) merge_row(total, part, row, a.head_dim);
  }
}

// What a row's weighted values are multiplied with: their scale over the sum of the row's weights and its head's sink.
inline float normaliser(const AttentionArgs& a, int64_t head, float max, float sum) {
  if (!a.sinks) return a.v_scale / sum;
  const float sink = a.sinks[head] * 1.44269504f, top = max < sink ? sink : max;
  const float shrink = first_lane(exp2(set1(max - top)));
  return a.v_scale * shrink / (sum * shrink + first_lane(exp2(set1(sink - top))));
}

template <typename T>
void write_rows(const AttentionArgs& a, const Plan& plan, const Tile& tile, int64_t head, const Partial& total) {
  const int64_t dim = a.head_dim;
  for (int64_t i = tile.first_member; i < tile.first_member + tile.members; ++i) {
    const Member& member = plan.members[i];
    int64_t row = member.row, token = a.query_start_loc[member.request] + member.first;
    for (const int64_t end = token + member.tokens; token < end; ++token) {
      T* out = static_cast<T*>(a.out) + (token * a.q.num_heads + head * plan.group) * dim;
      for (int64_t each = 0; each < plan.group; ++each, ++row, out += dim) {
        const float factor = normaliser(a, head * plan.group + each, total.max[row], total.sum[row]);
        scale_into(out, total.out + row * dim, set1(factor), dim);
      }
    }
  }
}

// The rows of the tile that a thread is at, and how they attend, which does not depend on the dtypes of queries and results.
class TileRows {
 protected:
  TileRows(const AttentionArgs& a, const Plan& plan)
      : a_(a),
        plan_(plan),
        dim_(a.head_dim),
        memory_(2 * kChunk * dim_ + kRows * kChunk + plan.most_rows * (3 * dim_ + kLanes + 4)),
        last_(plan.most_rows) {
    float* at = memory_.get();
    const auto take = [&](int64_t size) { return (at += size) - size; };
    keys_ = take(kChunk * dim_);
    values_ = take(kChunk * dim_);
    scores_ = take(kRows * kChunk);
    sums_ = take(plan.most_rows * kLanes);
    q_ = take(plan.most_rows * dim_);
    for (Partial* each : {&total_, &part_}) {
      each->out = take(plan.most_rows * dim_);
      each->max = take(plan.most_rows);
      each->sum = take(plan.most_rows);
    }
  }

  const Member& member_of(const Step& step) const { return plan_.members[step.tile->first_member + step.member]; }

  // Where the step's segment is gathered: the first one becomes the total itself.
  Partial target(const Step& step) const {
    if (plan_.partials) return partial_of(a_, plan_, step.item);
    return step.start < step.tile->begin + kSegment ? total_ : part_;
  }

  // The first token that any row of the step sees, in the tile whose only member it is of.
  int64_t first_token(const Step& step) const { return first_seen(a_, member_of(step).position); }

  // No row has seen anything of the step's segment.
  void clear_segment(const Step& step) {
    const Partial to = target(step);
    const int64_t rows = step.tile->rows;
    std::fill_n(to.out, rows * dim_, 0.0f);
    std::fill_n(to.max, rows, -__builtin_inff());
    std::fill_n(sums_, rows * kLanes, 0.0f);
  }

  // Of the scores: exp(x) = 2^(x log2 e).
  float factor() const { return a_.scale * 1.44269504f; }

  template <typename Some>
  void attend_rows(const Step& step, const Some& chunk, int64_t row, int64_t end) {
    const Partial to = target(step);
    const bool fresh = !a_.window && step.start % kSegment == 0;
    const bool adjusts = a_.softcap > 0 || a_.alibi_slopes;
    for (; row < end; row += kRows) {
      const int rows = static_cast<int>(least(kRows, end - row));
      const int tokens = static_cast<int>(least(kChunk, last_[row + rows - 1] - step.start + 1));
      int from[kRows] = {}, valid[kRows];
      for (int r = 0; r < rows; ++r) {
        if (a_.window) from[r] = static_cast<int>(greatest(first_seen(a_, last_[row + r]) - step.start, 0));
        valid[r] = static_cast<int>(least(kChunk, last_[row + r] - step.start + 1));
      }
      with_rows<kRows>(rows, [&]<int R>() {
        score_chunk<R>(chunk, q_ + row * dim_, scores_, dim_, tokens);
        if (adjusts) adjust(step, row, R, tokens);
        float* out = to.out + row * dim_;
        soften<R>(scores_, from, valid, tokens, out, to.max + row, sums_ + row * kLanes, dim_, fresh);
        add_chunk<R>(chunk, scores_, out, dim_, from[0], tokens, fresh);
      });
    }
  }

  // Soft-cap and ALiBi of the scores of rows.
  void adjust(const Step& step, int64_t row, int64_t rows, int tokens) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = step.head * plan_.group + (row + r) % plan_.group;
      const float slope = a_.alibi_slopes ? a_.alibi_slopes[head] * 1.44269504f : 0.0f;
      adjust_scores(scores_ + r * kChunk, tokens, a_.softcap * 1.44269504f, slope, step.start - last_[row + r]);
    }
  }

  void end_segment(const Step& step) {
    const Partial to = target(step);
    const Tile& tile = *step.tile;
    const int64_t start = step.start / kSegment * kSegment;
    for (int64_t i = tile.first_member; i < tile.first_member + tile.members; ++i) {
      const Member& member = plan_.members[i];
      const int64_t end = member.row + member.tokens * plan_.group;
      for (int64_t row = first_seeing(plan_, member, start); row < end; ++row) {
        to.sum[row] = reduce_sum(load(sums_ + row * kLanes));
      }
    }
    if (!plan_.partials && start > tile.begin) merge_segment(a_, plan_, tile, start, total_, part_);
  }

  const AttentionArgs& a_;
  const Plan& plan_;
  const int64_t dim_;
  Scratch<float> memory_;
  Scratch<int64_t> last_;  // position of each row's token, the last one that it sees
  float *keys_, *values_;  // of a widened chunk
  float *scores_, *sums_, *q_;
  Partial total_, part_;
};

// The steps of a thread's items. T: the dtype of queries and results; C is what the cache holds.
template <typename T, typename C, bool kDots>
class Worker : TileRows {
  using Near = typename ChunksOf<C, kDots>::Near;
  using Wide = typename ChunksOf<C, kDots>::Wide;

 public:
  Worker(const AttentionArgs& a, const Plan& plan) : TileRows(a, plan) {
    wide_.keys = reinterpret_cast<decltype(wide_.keys)>(keys_);
    wide_.values = values_;
    if constexpr (kDots) wide_.scale = factor();
  }

  // Takes items from `claim` until there are none. The next one is known in time to fetch its first chunk.
  template <typename Claim>
  void run(const Claim& claim) {
    Step step = first_step(a_, plan_, claim());
    if (!step.tile) return;
    Near chunks[2];
    if constexpr (kDots) chunks[0].scale = chunks[1].scale = factor();
    Near* chunk = &chunks[0];
    find_chunk(step, chunk);
    read_queries(step);
    if (a_.window) clear_segment(step);
    while (step.tile) {
      Step next = next_step(a_, plan_, step);
      const bool done = !next.tile;
      if (done) next = first_step(a_, plan_, claim());
      Near* other = chunk == &chunks[0] ? &chunks[1] : &chunks[0];
      chunk->next = next.tile ? other : chunk;
      if (next.tile) find_chunk(next, other);
      attend(step, *chunk);
      const bool ends = done || next.start / kSegment != step.start / kSegment;
      if (ends) end_segment(step);
      if (done && !plan_.partials) write_rows<T>(a_, plan_, *step.tile, step.head, total_);
      if (done && next.tile) read_queries(next);
      if (ends && next.tile && a_.window) clear_segment(next);
      step = next;
      chunk = other;
    }
  }

 private:
  void read_queries(const Step& step) {
    const Vec scale = set1(factor());
    for (int64_t i = step.tile->first_member; i < step.tile->first_member + step.tile->members; ++i) {
      const Member& member = plan_.members[i];
      const int64_t first = a_.query_start_loc[member.request] + member.first;
      int64_t row = member.row;
      for (int64_t token = 0; token < member.tokens; ++token) {
        const T* q = static_cast<const T*>(a_.q.data) + (first + token) * a_.q.token_stride +
                     step.head * plan_.group * a_.q.head_stride;
        for (int64_t each = 0; each < plan_.group; ++each, ++row, q += a_.q.head_stride) {
          if constexpr (kDots) {
            std::memcpy(q_ + row * dim_, q, dim_ * sizeof(T));
          } else {
            scale_into(q_ + row * dim_, q, scale, dim_);
          }
          last_[row] = member.position + token;
        }
      }
    }
  }

  // Tokens from the member's end on are never used: they point at the first of the chunk.
  void find_chunk(const Step& step, Near* chunk) const {
    const Member& member = member_of(step);
    const int32_t* blocks = a_.block_table + member.request * a_.table_stride;
    const int64_t end = member.end(), cell = dim_ * a_.block_size, seen = first_token(step);
    const uint32_t size = static_cast<uint32_t>(a_.block_size);
    chunk->key_stride = a_.block_size;
    for (int run = 0; run < kRuns; ++run) {
      int64_t at_token = step.start + (step.start + run * kRun < end ? run * kRun : 0);
      // Of runs before the window the scores are dropped and the values not read: any run of the request will do.
      if (at_token + kRun <= seen) at_token = seen / kRun * kRun;
      const uint32_t token = static_cast<uint32_t>(greatest(at_token, runs_are_whole() ? 0 : seen));
      const int64_t at = (blocks[token / size] * a_.num_kv_heads + step.head) * cell, offset = token % size;
      chunk->keys[run] = static_cast<const C*>(a_.k_cache) + at + offset;
      chunk->values[run] = static_cast<const C*>(a_.v_cache) + at + offset * dim_;
    }
  }

  // A run may cross blocks whose size is no multiple of 16.
  bool runs_are_whole() const { return a_.block_size % kRun == 0; }

  void widen(const Step& step, const Near& chunk) {
    const int64_t count = least(kChunk, member_of(step).end() - step.start);
    const int64_t seen = greatest(first_token(step) - step.start, 0);
    if (runs_are_whole()) {
      for (int64_t begin = seen / kRun * kRun; begin < count; begin += kRun) {
        widen_run(chunk, begin, least(kRun, count - begin));
      }
    } else {
      for (int64_t t = seen; t < count; ++t) widen_token(step, t);
    }
  }

  void widen_keys(const Near& chunk, int64_t begin) {
    const C *keys = chunk.keys[begin / kRun], *next = chunk.next->keys[begin / kRun];
    for (int64_t d = 0; d < dim_; ++d) {
      __builtin_prefetch(next + d * a_.block_size, 0, 2);
      if constexpr (kDots) {
        if (d % 2) continue;
        const auto pairs = chunk.key_pair(static_cast<int>(begin), d / 2);
        std::memcpy(wide_.keys + d / 2 * kChunk + begin, &pairs, sizeof(pairs));
      } else {
        for (int t = 0; t < kRun; t += kLanes) {
          store(wide_.keys + d * kChunk + begin + t, load(keys + d * a_.block_size + t));
        }
      }
    }
  }

  void widen_run(const Near& chunk, int64_t begin, int64_t tokens) {
    const C *values = chunk.values[begin / kRun], *next_values = chunk.next->values[begin / kRun];
    widen_keys(chunk, begin);
    float* to = wide_.values + begin * dim_;
    const int64_t size = tokens * dim_;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      __builtin_prefetch(next_values + i, 0, 2);
      store(to + i, load(values + i));
    }
    if (i < size) store_n(to + i, load_n(values + i, size - i), size - i);
  }

  void widen_token(const Step& step, int64_t t) {
    const int64_t token = step.start + t, block = token / a_.block_size, offset = token % a_.block_size;
    const int64_t id = a_.block_table[member_of(step).request * a_.table_stride + block];
    const int64_t cell = (id * a_.num_kv_heads + step.head) * dim_ * a_.block_size;
    const C* key = static_cast<const C*>(a_.k_cache) + cell + offset;
    const C* value = static_cast<const C*>(a_.v_cache) + cell + offset * dim_;
    for (int64_t d = 0; d < dim_; ++d) {
      if constexpr (kDots) {
        std::memcpy(reinterpret_cast<C*>(wide_.keys + d / 2 * kChunk + t) + d % 2, key + d * a_.block_size, sizeof(C));
      } else {
        wide_.keys[d * kChunk + t] = first_lane(load_n(key + d * a_.block_size, 1));
      }
      wide_.values[t * dim_ + d] = first_lane(load_n(value + d, 1));
    }
  }

  void attend(const Step& step, const Near& chunk) {
    const Member& first = member_of(step);
    const Member& last = *(&first + step.members - 1);
    const int64_t row = first_seeing(plan_, first, step.start);
    const int64_t end = last_seeing(a_, plan_, last, step.start + kChunk);
    if (runs_are_whole() && end - row <= kRows) {
      attend_rows(step, chunk, row, end);
    } else {
      widen(step, chunk);
      attend_rows(step, wide_, row, end);
    }
  }

  Wide wide_;
};

// Segments of a tile's key head, merged in order into the first.
template <typename T>
void merge_item(const AttentionArgs& a, const Plan& plan, int64_t index, int64_t head) {
  const Tile& tile = plan.tiles[index];
  const int64_t first = plan.first_item[index] + head;
  const Partial total = partial_of(a, plan, first);
  for (int64_t start = tile.begin + kSegment; start < tile.end; start += kSegment) {
    const int64_t item = first + (start - tile.begin) / kSegment * a.num_kv_heads;
    merge_segment(a, plan, tile, start, total, partial_of(a, plan, item));
  }
  write_rows<T>(a, plan, tile, head, total);
}

template <typename T, typename C, bool kDots>
void run_plan(const AttentionArgs& a, const Plan& plan) {
  Shares shares(plan.items());
#pragma omp parallel if (plan.items() > 1)
  {
    Worker<T, C, kDots> worker(a, plan);
    int64_t turn = 0;
    worker.run([&] { return shares.claim(&turn); });
    if (plan.partials) {
#pragma omp barrier
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < plan.num_tiles * a.num_kv_heads; ++i) {
        merge_item<T>(a, plan, i / a.num_kv_heads, i % a.num_kv_heads);
      }
    }
  }
}

template <typename T>
void attend_all(const AttentionArgs& a) {
  const int64_t group = a.q.num_heads / a.num_kv_heads, heads = a.num_kv_heads;
  const int64_t wanted = kItemsPerThread * max_threads();
  const int64_t rows = a.query_start_loc[a.requests] * group;
  // Few rows are cut small enough to keep all threads busy.
  const int64_t most_rows = least(kTileRows, greatest(rows * heads / wanted, kRows));
  const int64_t tokens = greatest(most_rows / group, 1);
  int64_t most = 0;
  for (int64_t r = 0; r < a.requests; ++r) most += (queries_of(a, r) + tokens - 1) / tokens;
  Scratch<Member> members(most);
  Scratch<Tile> tiles(most);
  const int64_t count = make_tiles(a, group, most_rows, members.get(), tiles.get());
  const bool split = count * heads < wanted && max_threads() > 1;
  Scratch<int64_t> first_item(count + 1), first_partial(count + 1);
  first_item[0] = first_partial[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t items = heads * (split ? (tiles[i].end - tiles[i].begin + kSegment - 1) / kSegment : 1);
    first_item[i + 1] = first_item[i] + items;
    first_partial[i + 1] = first_partial[i] + (split ? items * tiles[i].rows * (a.head_dim + 2) : 0);
  }
  Scratch<float> partials(first_partial[count]);
  const Plan plan{members.get(), tiles.get(), first_item.get(), count, group, greatest(most_rows, group),
                  split ? partials.get() : nullptr, first_partial.get()};
#if defined(__AVX512BF16__)
  if constexpr (__is_same(T, BF16)) {
    if (a.dots) return run_plan<BF16, BF16, true>(a, plan);
  }
#endif
  switch (a.cache_dtype) {
    case CacheDType::same:
      return run_plan<T, T, false>(a, plan);
    case CacheDType::e4m3:
      return run_plan<T, E4M3, false>(a, plan);
    case CacheDType::e5m2:
      return run_plan<T, E5M2, false>(a, plan);
  }
}

}  // namespace

void paged_attention(const AttentionArgs& a) { VLLM_DISPATCH_DTYPE(a.dtype, attend_all<scalar_t>(a)); }

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
