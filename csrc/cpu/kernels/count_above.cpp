// How many of each row's logits exceed given values, in one pass over memory; see thresholds.h and threshold_search.h.
#include "../threshold_search.h"

namespace vllm_cpu {
namespace VLLM_ISA {
namespace {

int64_t num_valid(const CountAboveArgs& args, int64_t row) {
  return args.num_values == nullptr ? args.width : args.num_values[row];
}

void count_in_segments(const CountAboveArgs& args) {
  const int64_t num_rows = args.logits.rows, n = args.logits.vocab, width = args.width;
  const int64_t num_segments = (n + kSegment - 1) / kSegment;
  const int64_t padded = padded_thresholds(width);
  const Pieces pieces(num_rows, num_segments);
  Scratch<int32_t> counts(num_rows * pieces.per_row * width), columns(num_rows * width);
  Scratch<float> thresholds(num_rows * padded);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      sort_thresholds(args.values + row * args.values_stride, num_valid(args, row), padded,
                      thresholds.get() + row * padded, columns.get() + row * width);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_rows * pieces.per_row; ++task) {
      const int64_t row = task / pieces.per_row, piece = task % pieces.per_row, valid = num_valid(args, row);
      if (valid == 0) continue;
      ThresholdCounts exceeding(thresholds.get() + row * padded, valid);
      for (int64_t s = pieces.first_segment(piece); s < pieces.first_segment(piece + 1); ++s) {
        const int64_t first = s * kSegment, size = least(kSegment, n - first);
        alignas(64) float buffer[kSegment];
        const float* x = as_floats(args.logits, row, first, size, buffer);
        const float* next = x == buffer ? x : x + kSegment;
        exceeding.add(x, size, BlockExtremes(x, (size + kLanes - 1) / kLanes * kLanes), next);
      }
      exceeding.finish(counts.get() + task * width);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t w = 0; w < num_valid(args, row); ++w) {
        int32_t count = 0;
        for (int64_t p = 0; p < pieces.per_row; ++p) count += counts[(row * pieces.per_row + p) * width + w];
        args.counts[row * width + columns[row * width + w]] = count;
      }
    }
  }
}

void count_each_row(const CountAboveArgs& args) {
#pragma omp parallel
  {
    const RowScratch scratch(args.logits.vocab);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < args.logits.rows; ++row) {
      count_many(args.logits, row, args.values + row * args.values_stride, num_valid(args, row), scratch,
                 args.counts + row * args.width);
    }
  }
}

}  // namespace

void count_above(const CountAboveArgs& args) {
  if (args.width > kManyAbove) {
    count_each_row(args);
  } else {
    count_in_segments(args);
  }
  for (int64_t row = 0; row < args.logits.rows; ++row) {
    for (int64_t w = num_valid(args, row); w < args.width; ++w) args.counts[row * args.width + w] = 0;
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
