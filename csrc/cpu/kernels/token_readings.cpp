// Chosen logits, their true ranks, log-sum-exp, argmax and, if asked, entropy of rows of logits, in one pass over
// memory; and, if asked, the greatest logits with theirs.
//
// A row is read in segments of fixed size that stay in the first-level cache while they are looked at three times:
// for the maximum, for the sum of exponentials, for the ranks. A segment's results do not depend on the number of
// threads or on the other rows, and segments are joined in order, so neither do a row's.
//
// The ranks are the dear part; see thresholds.h, and threshold_search.h for many of a row. The greatest logits' follow
// from their order.
#include "../older_libraries.h"

#include <math.h>
#include <string.h>

#include "../kernels_readings.h"
#include "../topk_row.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

struct Segment {
  float max;
  int32_t argmax;
  double sum;  // of exp(x - max), or of about 0 when the maximum is -inf; NaN if there is a NaN
  double weighted;  // the sum of (x - max) * exp(x - max), if asked
};

// Sets the segment's sum and, if kEntropy, its weighted sum; fetches as many bytes as it reads from `next`, or every
// second line of them if kHalf.
template <bool kEntropy, bool kHalf>
inline void sum_exp(const float* x, int64_t n, float offset, const float* next, Segment* result) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  Vec weighted[4] = {zero(), zero(), zero(), zero()};
  const Vec shift = set1(offset);
  // -inf becomes a number whose exponential is 0 too: 0 times -inf would be NaN. In this order NaN stays.
  const Vec lowest = set1(-200.0f);
  const auto add = [&](int u, Vec v) __attribute__((always_inline)) {
    const Vec shifted = v - shift;
    const Vec weight = exp(shifted);
    sums[u] = sums[u] + weight;
    if constexpr (kEntropy) weighted[u] = fma(max(lowest, shifted), weight, weighted[u]);
  };
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int line = 0; line < 4 * kLanes; line += kHalf ? 32 : 16) __builtin_prefetch(next + i + line, 0, 2);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) add(u, load(x + i + u * kLanes));
  }
  for (; i < n; i += kLanes) add(0, load(x + i));
  result->sum = reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if constexpr (kEntropy) result->weighted = reduce_sum((weighted[0] + weighted[1]) + (weighted[2] + weighted[3]));
}

// One segment: `size` logits from `first`, which are also counted.
Segment read_segment(const Logits& logits, int64_t row, int64_t first, int64_t size, ThresholdCounts* counts,
                     bool entropy) {
  alignas(64) float buffer[kSegment];
  const float* x = as_floats(logits, row, first, size, buffer);
  const int64_t n = (size + kLanes - 1) / kLanes * kLanes;
  const BlockExtremes blocks(x, n);

  Segment result{-kInfinity, static_cast<int32_t>(first), 0.0, 0.0};
  int64_t best_block = -1;
  for (int64_t block = 0; block * kBlock < n; ++block) {
    if (blocks.max[block] > result.max) {
      result.max = blocks.max[block];
      best_block = block;
    }
  }
  if (best_block >= 0) {
    int64_t i = best_block * kBlock;
    while (!any(eq(load(x + i), set1(result.max)))) i += kLanes;
    while (x[i] != result.max) ++i;
    result.argmax = static_cast<int32_t>(first + i);
  }
  const float offset = result.max == -kInfinity ? 0.0f : result.max;
  // The next segment comes from memory while this one is worked on, instead of after it.
  const float* next = x == buffer ? x : x + kSegment;
  if (entropy) {
    sum_exp<true, false>(x, n, offset, next, &result);
  } else if (counts->is_empty()) {
    sum_exp<false, false>(x, n, offset, next, &result);
  } else {
    sum_exp<false, true>(x, n, offset, next, &result);
  }
  counts->add(x, size, blocks, next + 16);
  return result;
}

void write_padding(const RankedReadingsArgs& args, int64_t row, int64_t valid) {
  for (int64_t w = valid; w < args.width; ++w) {
    args.chosen[row * args.width + w] = args.logprobs[row * args.width + w] = 0.0f;
    args.ranks[row * args.width + w] = 0;
  }
}

int64_t num_valid(const RankedReadingsArgs& args, int64_t row) {
  return args.num_token_ids == nullptr ? args.width : args.num_token_ids[row];
}

// How many of a row's columns are given by their id: not the argmax, nor the greatest logits after the first column.
int64_t num_named(const RankedReadingsArgs& args, int64_t row) {
  return num_valid(args, row) - (args.greedy ? 1 : 0) - args.num_topk;
}

// The column of the i-th of these.
int64_t named_column(const RankedReadingsArgs& args, int64_t i) {
  return args.greedy ? 1 + args.num_topk + i : i == 0 ? 0 : args.num_topk + i;
}

// Their logits.
void gather(const RankedReadingsArgs& args, int64_t row, float* named) {
  const int32_t* ids = args.token_ids + row * args.ids_stride;
  for (int64_t i = 0; i < num_named(args, row); ++i) {
    const int64_t column = named_column(args, i);
    named[i] = args.chosen[row * args.width + column] = logit_at(args.logits, row, ids[column]);
  }
  write_padding(args, row, num_valid(args, row));
}

void put_ids(const RankedReadingsArgs& args, int64_t row) {
  if (args.columns == nullptr) return;
  memcpy(args.columns + row * args.width, args.token_ids + row * args.ids_stride, args.width * sizeof(int32_t));
}

// The greatest logits: ties share the first one's rank.
void put_topk(const RankedReadingsArgs& args, int64_t row, const RowScratch& scratch) {
  if (args.num_topk == 0) return;
  const int64_t first = row * args.width + 1;
  float* values = args.chosen + first;
  best_of_row(args.logits, row, args.num_topk, scratch, values, args.columns + first);
  int32_t* ranks = args.ranks + first;
  for (int64_t i = 0; i < args.num_topk; ++i) {
    ranks[i] = i > 0 && values[i] == values[i - 1] ? ranks[i - 1] : static_cast<int32_t>(i + 1);
  }
}

// The first column, once the argmax is known: nothing is greater than the greatest.
void put_argmax(const RankedReadingsArgs& args, int64_t row) {
  args.columns[row * args.width] = args.argmax[row];
  args.chosen[row * args.width] = args.max[row];
  args.ranks[row * args.width] = 1;
}

void join_segments(const RankedReadingsArgs& args, int64_t row, const Segment* segments, int64_t num_segments) {
  const Segment* best = segments;
  for (int64_t s = 1; s < num_segments; ++s) {
    if (segments[s].max > best->max) best = segments + s;
  }
  double sum = 0, weighted = 0;
  bool has_nan = false;
  for (int64_t s = 0; s < num_segments; ++s) {
    has_nan |= segments[s].sum != segments[s].sum;
    if (segments[s].max == -kInfinity) continue;
    const double shift = double(segments[s].max) - double(best->max), scale = ::exp(shift);
    sum += segments[s].sum * scale;
    weighted += (segments[s].weighted + shift * segments[s].sum) * scale;
  }
  args.max[row] = best->max;
  args.argmax[row] = best->argmax;
  args.lse[row] = static_cast<float>(best->max + ::log(sum));
  if (has_nan) args.lse[row] = __builtin_nanf("");
  if (args.entropy == nullptr) return;
  // Both terms are >= 0 but for rounding. When everything is -inf, 0 / 0 makes it NaN.
  const double entropy = ::log(sum) - weighted / sum;
  args.entropy[row] = has_nan ? __builtin_nanf("") : entropy < 0 ? 0.0f : static_cast<float>(entropy);
}

// One thread reads a piece of a row at a time: counts of `num` thresholds, the logits `named`.
void read_piece(const RankedReadingsArgs& args, const Pieces& pieces, int64_t row, int64_t piece, const float* named,
                int64_t num, Segment* segments, int32_t* counts) {
  const int64_t n = args.logits.vocab;
  alignas(64) float thresholds[kManyAbove + kThresholdPad];
  int32_t order[kManyAbove], ordered[kManyAbove];
  sort_thresholds(named, num, padded_thresholds(num), thresholds, order);
  ThresholdCounts exceeding(thresholds, num);
  for (int64_t s = pieces.first_segment(piece); s < pieces.first_segment(piece + 1); ++s) {
    const int64_t first = s * kSegment, size = least(kSegment, n - first);
    segments[s] = read_segment(args.logits, row, first, size, &exceeding, args.entropy != nullptr);
  }
  exceeding.finish(ordered);
  for (int64_t w = 0; w < num; ++w) counts[order[w]] = ordered[w];
}

// `counts`: of each of `num_pieces`, `num` of them `stride` apart.
void finish_row(const RankedReadingsArgs& args, const Pieces& pieces, int64_t row, int64_t num, const Segment* segments,
                const int32_t* counts, int64_t num_pieces, int64_t stride) {
  join_segments(args, row, segments, pieces.num_segments);
  if (args.greedy) put_argmax(args, row);
  const int64_t start = row * args.width, valid = num_valid(args, row);
  for (int64_t w = 0; w < valid; ++w) args.logprobs[start + w] = args.chosen[start + w] - args.lse[row];
  for (int64_t i = 0; i < num; ++i) {
    int32_t rank = 1;
    for (int64_t p = 0; p < num_pieces; ++p) rank += counts[p * stride + i];
    args.ranks[start + named_column(args, i)] = rank;
  }
  if (!args.ranked) memset(args.ranks + start, 0, valid * sizeof(int32_t));
}

// Write each row's ids, logprobs, logits and ranks, log-sum-exp and entropy (NaN where it was not asked for).
void write_table(const RankedReadingsArgs& args) {
  const int64_t width = args.width, bytes = width * int64_t{sizeof(int32_t)};
  for (int64_t row = 0; row < args.logits.rows; ++row) {
    int32_t* out = args.table + row * (4 * width + 2);
    const int32_t* ids = args.columns == nullptr ? args.token_ids + row * args.ids_stride : args.columns + row * width;
    memcpy(out, ids, bytes);
    memcpy(out + width, args.logprobs + row * width, bytes);
    memcpy(out + 2 * width, args.chosen + row * width, bytes);
    memcpy(out + 3 * width, args.ranks + row * width, bytes);
    const float entropy = args.entropy == nullptr ? __builtin_nanf("") : args.entropy[row];
    memcpy(out + 4 * width, args.lse + row, sizeof(float));
    memcpy(out + 4 * width + 1, &entropy, sizeof(float));
  }
}

// How a call is shared out among threads, and what they keep.
struct Plan {
  const Pieces pieces;
  const int64_t most_named;  // of a row
  const bool searches;       // ranks need more than comparisons
  const bool is_shared;      // several threads read a row
  const Scratch<Segment> segments;
  const Scratch<float> named;
  const Scratch<int32_t> counts;  // [rows, pieces, most_named]

  explicit Plan(const RankedReadingsArgs& args)
      : pieces(args.logits.rows, (args.logits.vocab + kSegment - 1) / kSegment),
        most_named(args.width - (args.greedy ? 1 : 0) - args.num_topk),
        searches(args.ranked && most_named > kManyAbove),
        is_shared(pieces.per_row > 1),
        segments(args.logits.rows * pieces.num_segments),
        named(args.logits.rows * most_named),
        counts(args.logits.rows * pieces.per_row * most_named) {}

  float* named_of(int64_t row) const { return named.get() + row * most_named; }
  int32_t* counts_of(int64_t row) const { return counts.get() + row * pieces.per_row * most_named; }
};

void begin_row(const RankedReadingsArgs& args, const Plan& plan, int64_t row, const RowScratch& scratch) {
  gather(args, row, plan.named_of(row));
  put_ids(args, row);
  put_topk(args, row, scratch);
}

void end_row(const RankedReadingsArgs& args, const Plan& plan, int64_t row, const RowScratch& scratch) {
  const int64_t num = args.ranked ? num_named(args, row) : 0;
  if (plan.searches) count_many(args.logits, row, plan.named_of(row), num, scratch, plan.counts_of(row));
  finish_row(args, plan.pieces, row, num, plan.segments.get() + row * plan.pieces.num_segments, plan.counts_of(row),
             plan.searches ? 1 : plan.pieces.per_row, plan.most_named);
}

}  // namespace

void ranked_readings(const RankedReadingsArgs& args) {
  const int64_t num_rows = args.logits.rows;
  const Plan plan(args);
  const Pieces& pieces = plan.pieces;
#pragma omp parallel
  {
    const RowScratch scratch(plan.searches || args.num_topk > kFewBest ? args.logits.vocab : 0);
    if (plan.is_shared) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row) begin_row(args, plan, row, scratch);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_rows * pieces.per_row; ++task) {
      const int64_t row = task / pieces.per_row, piece = task % pieces.per_row;
      if (!plan.is_shared) begin_row(args, plan, row, scratch);
      read_piece(args, pieces, row, piece, plan.named_of(row),
                 plan.searches || !args.ranked ? 0 : num_named(args, row),
                 plan.segments.get() + row * pieces.num_segments, plan.counts_of(row) + piece * plan.most_named);
      if (!plan.is_shared) end_row(args, plan, row, scratch);
    }
    if (plan.is_shared) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_rows; ++row) end_row(args, plan, row, scratch);
    }
  }
  if (args.table != nullptr) write_table(args);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
