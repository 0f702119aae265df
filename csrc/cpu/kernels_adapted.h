// Adapters (LoRA) add this to a product with a packed weight: a part of LinearArgs.
#pragma once

#include <cstdint>

#include "kernels_lora.h"

namespace vllm_cpu {

// Columns that the rows of a block of B have side by side: half of a panel.
constexpr int64_t kBlockColumns = 16;

// The adapter of a product's row, -1 = none, and how many kRankChunk hold the ranks that it has in any part.
struct AdaptedRow {
  int32_t adapter, chunks;
};
constexpr int64_t kRankChunk = 8;

// See ops/adapted_linear.py. A and B are of x's dtype; of bfloat16 two values of k, or two ranks, stand side by side in them:
// [.., k / 2, 16, 2] in place of [.., k, 16]. All pointers are null where there are no adapters.
struct AdaptedArgs {
  const int32_t* order;         // [rows]: those of adapter i from starts[i] on, behind the last those of none; null: as they are
  const int32_t* starts;        // [adapters + 1]
  const void* a;                // [adapters, groups, inner, kRankGroup]
  const void* b;                // [blocks, adapters, part_ranks, kBlockColumns]
  const int32_t* ranks;         // [adapters, parts]
  const float* scales;          // [adapters, parts]
  const int32_t* first_blocks;  // [2 * panels + 1]: where the blocks of each half of a panel begin
  const int32_t* block_parts;   // [blocks]
  const float* gain;            // [adapters, 32 * panels], or null
  const float* shift;           // [adapters, 32 * panels], or null
  int64_t adapters, groups, parts;
  int64_t part_ranks;  // groups / parts * kRankGroup
  // The product's own affair, in that order: the rows' adapters, and their products with A, zero where there are no ranks.
  AdaptedRow* adapted_rows;  // [rows]
  void* products;            // [rows, groups * kRankGroup]
};

}  // namespace vllm_cpu
