// Attention by tiles of rows, wherever keys and values lie: the rows' memory, how they attend a chunk, the
// merging of segments, and results.
//
// Include only from kernels/*.cpp.
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "attention_tile.h"
#include "kernels.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int64_t kItemsPerThread = 4;

// Floats of an item's partial: whole cache lines.
inline int64_t partial_size(int64_t rows, int64_t dim) { return (rows * (dim + 2) + 15) / 16 * 16; }

// Where an item that is one segment leaves its rows.
inline Partial partial_of(const AttentionArgs& a, const Plan& plan, int64_t item) {
  const int64_t index = find_tile(plan, &item), rows = plan.tiles[index].rows;
  float* at = plan.partials + plan.first_partial[index] + item * partial_size(rows, a.value_dim);
  return {at, at + rows * a.value_dim, at + rows * (a.value_dim + 1)};
}

// The first row of a member that sees the token at `start`.
inline int64_t first_seeing(const Plan& plan, const Member& member, int64_t start) {
  const int64_t past = greatest(start - member.position, 0);
  return member.row + least(past, member.tokens) * plan.group;
}

// The row after the last one of a member that sees a token before `end`.
inline int64_t last_seeing(const AttentionArgs& a, const Plan& plan, const Member& member, int64_t end) {
  if (!a.window) return member.row + member.tokens * plan.group;
  const int64_t past = a.in_chunks ? (end + a.window - 1) / a.window * a.window : end + a.window - 1;
  return member.row + least(member.tokens, greatest(past - member.position, 0)) * plan.group;
}

inline void merge_segment(const AttentionArgs& a, const Plan& plan, const Tile& tile, int64_t start, const Partial& total,
                   const Partial& part) {
  for (int64_t i = tile.first_member; i < tile.first_member + tile.members; ++i) {
    const Member& member = plan.members[i];
    merge_rows(total, part, first_seeing(plan, member, start), last_seeing(a, plan, member, start + kSegment), a.value_dim);
  }
}

// The factor of a row's weighted values: their scale over the sum of the row's weights and its head's sink.
inline float normaliser(const AttentionArgs& a, int64_t head, float max, float sum) {
  if (!a.sinks) return a.v_scale / sum;
  const float sink = a.sinks[head] * 1.44269504f, top = max < sink ? sink : max;
  const float shrink = first_lane(exp2(set1(max - top)));
  return a.v_scale * shrink / (sum * shrink + first_lane(exp2(set1(sink - top))));
}

template <typename T>
void write_rows(const AttentionArgs& a, const Plan& plan, const Tile& tile, int64_t head, const Partial& total) {
  const int64_t dim = a.value_dim;
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

// The rows of the tile that a thread is at. `own` floats in front of their memory are for the kernel that attends.
class TileRows {
 protected:
  TileRows(const AttentionArgs& a, const Plan& plan, int64_t own)
      : a_(a),
        plan_(plan),
        dim_(a.head_dim),
        value_dim_(a.value_dim),
        memory_(own + plan.most_rows * (2 * value_dim_ + kLanes + 4)),
        last_(plan.most_rows),
        own_(memory_.get()) {
    float* at = own_ + own;
    const auto take = [&](int64_t size) { return (at += size) - size; };
    sums_ = take(plan.most_rows * kLanes);
    total_.out = take(plan.most_rows * value_dim_);
    part_.out = take(plan.most_rows * value_dim_);
    for (Partial* each : {&total_, &part_}) {
      each->max = take(plan.most_rows);
      each->sum = take(plan.most_rows);
    }
  }

  // Take floats of the kernel's memory.
  float* take(int64_t size) { return (own_ += size) - size; }

  const Member& member_of(const Step& step) const { return plan_.members[step.tile->first_member + step.member]; }

  // Where the step's segment is gathered: the first one becomes the total itself.
  Partial target(const Step& step) const {
    if (plan_.partials) return partial_of(a_, plan_, step.item);
    return step.start < step.tile->begin + kSegment ? total_ : part_;
  }

  // The first token that any row of the step sees, in the tile whose only member it is of.
  int64_t first_token(const Step& step) const { return first_seen(a_, member_of(step).position); }

  // Whether rows have no sums yet when they come to the step.
  bool is_fresh(const Step& step) const { return !a_.window && step.start % kSegment == 0; }

  // Find the tokens of the step's chunk that `rows` rows from `row` on see, from[r] to valid[r] of it; up to which one
  // sees any.
  int find_seen(const Step& step, int64_t row, int rows, int* from, int* valid) const {
    // Rows after it see no less: they are of later tokens, or of members that have the chunk in common.
    if (!a_.window && last_[row] - step.start >= kChunk - 1) {
      std::fill_n(from, rows, 0);
      std::fill_n(valid, rows, kChunk);
      return kChunk;
    }
    for (int r = 0; r < rows; ++r) {
      from[r] = a_.window ? static_cast<int>(greatest(first_seen(a_, last_[row + r]) - step.start, 0)) : 0;
      valid[r] = static_cast<int>(least(kChunk, last_[row + r] - step.start + 1));
    }
    return valid[rows - 1];
  }

  // The rows that see some of the step's chunk.
  int64_t first_row(const Step& step) const { return first_seeing(plan_, member_of(step), step.start); }
  int64_t end_row(const Step& step) const {
    return last_seeing(a_, plan_, *(&member_of(step) + step.members - 1), step.start + kChunk);
  }

  // No row has seen anything of the step's segment.
  void clear_segment(const Step& step) {
    const Partial to = target(step);
    const int64_t rows = step.tile->rows;
    std::fill_n(to.out, rows * value_dim_, 0.0f);
    std::fill_n(to.max, rows, -__builtin_inff());
    std::fill_n(sums_, rows * kLanes, 0.0f);
  }

  // Scores are scaled for exp2: exp(x) = 2^(x log2 e).
  float factor() const { return a_.scale * 1.44269504f; }

  bool adjusts() const { return a_.softcap > 0 || a_.alibi_slopes; }

  // Soft-cap and ALiBi of a row's scores, in units of log2.
  void adjust(const Step& step, int64_t row, int tokens, float* scores) const {
    const int64_t head = step.head * plan_.group + row % plan_.group;
    const float slope = a_.alibi_slopes ? a_.alibi_slopes[head] * 1.44269504f : 0.0f;
    adjust_scores(scores, tokens, a_.softcap * 1.44269504f, slope, step.start - last_[row]);
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
  const int64_t dim_, value_dim_;
  Scratch<float> memory_;
  Scratch<int64_t> last_;  // position of each row's token, the last one that it sees
  float *own_, *sums_;
  Partial total_, part_;
};

// Rows that attend chunks by vectors.
class VectorRows : protected TileRows {
 protected:
  VectorRows(const AttentionArgs& a, const Plan& plan)
      : TileRows(a, plan, (kChunk + plan.most_rows) * a.head_dim + kChunk * (a.value_dim + kRows)) {
    keys_ = take(kChunk * dim_);
    values_ = take(kChunk * value_dim_);
    scores_ = take(kRows * kChunk);
    q_ = take(plan.most_rows * dim_);
  }

  // Lets the rows attend a chunk; before(i, n) comes before the i-th of n tiles of them.
  template <typename Some, typename Before>
  void attend_rows(const Step& step, const Some& chunk, int64_t row, int64_t end, const Before& before) {
    const Partial to = target(step);
    const bool fresh = is_fresh(step);
    const int64_t tiles = (end - row + kRows - 1) / kRows;
    for (int64_t tile = 0; tile < tiles; ++tile, row += kRows) {
      before(tile, tiles);
      const int rows = static_cast<int>(least(kRows, end - row));
      int from[kRows], valid[kRows];
      const int tokens = find_seen(step, row, rows, from, valid);
      const auto adjusted = [&](float* scores, int64_t r, int count) VLLM_INLINE { adjust(step, row + r, count, scores); };
      with_rows<kRows>(rows, [&]<int R>() {
        attend_chunk<R>(chunk, q_ + row * dim_, dim_, value_dim_, from, valid, tokens, factor(), adjusts(), adjusted, scores_,
                        to.out + row * value_dim_, to.max + row, sums_ + row * kLanes, fresh);
      });
    }
  }

  float *keys_, *values_;  // of a widened chunk
  float *scores_, *q_;
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

// Attends by Workers, a thread each, whose results are of T.
template <typename T, typename Worker, typename Args>
void run_plan(const Args& a, const Plan& plan) {
  Shares shares(plan.items());
#pragma omp parallel if (plan.items() > 1)
  {
    Worker worker(a, plan);
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

// Calls `run` with a plan whose tiles have up to `most_rows` rows, at least those of one token.
template <typename F>
void with_plan(const AttentionArgs& a, int64_t most_rows, int64_t least_rows, const F& run) {
  const int64_t group = a.q.num_heads / a.num_kv_heads, heads = a.num_kv_heads;
  const int64_t wanted = kItemsPerThread * max_threads();
  const int64_t rows = a.query_start_loc[a.requests] * group;
  // Few rows are cut small enough to keep all threads busy, but not below `least_rows`.
  most_rows = least(most_rows, greatest(rows * heads / wanted, least_rows));
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
    first_partial[i + 1] = first_partial[i] + (split ? items * partial_size(tiles[i].rows, a.value_dim) : 0);
  }
  Scratch<float> partials(first_partial[count]);
  run(Plan{members.get(), tiles.get(), first_item.get(), count, group, greatest(most_rows, group),
           split ? partials.get() : nullptr, first_partial.get()});
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
