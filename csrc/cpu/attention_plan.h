// How paged_attention.cpp shares its work: queries in tiles, their contexts in segments and chunks, and the steps of one item
// after another.
#pragma once

#include <cstdint>

#include "attention_tile.h"
#include "kernels.h"

namespace vllm_cpu {
namespace VLLM_ISA {

constexpr int64_t kSegment = 256;

// Consecutive queries of a request, from token `first` of its queries, at position `position` and those after it.
struct Member {
  int64_t request, first, tokens, position;
  int64_t row;  // in the tile
  int64_t end() const { return position + tokens; }
};

struct Tile {
  int64_t first_member, members, rows, end;
  int64_t begin;  // of the first segment that a row sees
};

struct Plan {
  const Member* members;
  const Tile* tiles;
  const int64_t* first_item;  // [tiles + 1]
  int64_t num_tiles, group, most_rows;
  float* partials;  // of all items, when an item is one segment of a tile's key head; null when it is all of them
  const int64_t* first_partial;  // [tiles + 1], floats
  int64_t items() const { return first_item[num_tiles]; }
};

// A step is computed at once: a chunk, and members of a tile that have it in common.
struct Step {
  const Tile* tile;  // null: no step
  int64_t item;
  int64_t head, start, end;
  int64_t member, members;
};

inline int64_t greatest(int64_t a, int64_t b) { return a < b ? b : a; }

inline int64_t queries_of(const AttentionArgs& a, int64_t request) {
  return a.query_start_loc[request + 1] - a.query_start_loc[request];
}

// The first token that the query at `position` sees.
inline int64_t first_seen(const AttentionArgs& a, int64_t position) {
  if (!a.window) return 0;
  return a.in_chunks ? position / a.window * a.window : greatest(position - a.window + 1, 0);
}

// Whether the chunk at `start` lies wholly before the queries of both and in the same blocks.
inline bool share_chunk(const AttentionArgs& a, const Member& one, const Member& other, int64_t start) {
  if (a.window || start + kChunk > one.position || start + kChunk > other.position) return false;
  const int32_t* blocks = a.block_table + one.request * a.table_stride;
  const int32_t* others = a.block_table + other.request * a.table_stride;
  for (int64_t block = start / a.block_size; block * a.block_size < start + kChunk; ++block) {
    if (blocks[block] != others[block]) return false;
  }
  return true;
}

// Cuts the queries into members and these into tiles; the number of tiles. `members` and `tiles` have room for all.
inline int64_t make_tiles(const AttentionArgs& a, int64_t group, int64_t most_rows, Member* members, Tile* tiles) {
  const int64_t most_tokens = greatest(most_rows / group, 1);
  int64_t count = 0, num_tiles = 0;
  for (int64_t request = 0; request < a.requests; ++request) {
    const int64_t queries = queries_of(a, request);
    const int64_t parts = (queries + most_tokens - 1) / most_tokens;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = queries * part / parts, tokens = queries * (part + 1) / parts - first;
      Member& member = members[count];
      member = {request, first, tokens, a.seq_lens[request] - queries + first, 0};
      Tile* last = num_tiles ? &tiles[num_tiles - 1] : nullptr;
      if (last && last->rows + tokens * group <= most_rows && share_chunk(a, members[count - 1], member, 0)) {
        member.row = last->rows;
        last->rows += tokens * group;
        last->end = greatest(last->end, member.end());
        ++last->members;
      } else {
        const int64_t begin = first_seen(a, member.position) / kSegment * kSegment;
        tiles[num_tiles++] = {count, 1, tokens * group, member.end(), begin};
      }
      ++count;
    }
  }
  return num_tiles;
}

// Fills in how many members have the step's chunk in common; moves on to the next chunk when none is left.
inline Step settle(const AttentionArgs& a, const Plan& plan, Step step) {
  const Member* members = plan.members + step.tile->first_member;
  for (; step.start < step.end; step.start += kChunk, step.member = 0) {
    while (step.member < step.tile->members && members[step.member].end() <= step.start) ++step.member;
    if (step.member == step.tile->members) continue;
    step.members = 1;
    while (step.member + step.members < step.tile->members &&
           share_chunk(a, members[step.member], members[step.member + step.members], step.start)) {
      ++step.members;
    }
    return step;
  }
  step.tile = nullptr;
  return step;
}

inline Step next_step(const AttentionArgs& a, const Plan& plan, Step step) {
  step.member += step.members;
  return settle(a, plan, step);
}

// The tile of an item, which counts from the tile's first one afterwards.
inline int64_t find_tile(const Plan& plan, int64_t* item) {
  int64_t low = 0, high = plan.num_tiles;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (plan.first_item[middle] <= *item ? low : high) = middle;
  }
  *item -= plan.first_item[low];
  return low;
}

inline Step first_step(const AttentionArgs& a, const Plan& plan, int64_t item) {
  Step step{};
  if (item >= plan.items()) return step;
  step.item = item;
  step.tile = plan.tiles + find_tile(plan, &item);
  step.head = item % a.num_kv_heads;
  step.end = step.tile->end;
  step.start = step.tile->begin;
  if (plan.partials) {
    step.start += item / a.num_kv_heads * kSegment;
    step.end = least(step.end, step.start + kSegment);
  }
  // The first member is the only one where there is a window.
  const int64_t seen = first_seen(a, plan.members[step.tile->first_member].position);
  step.start = greatest(step.start, seen / kChunk * kChunk);
  return settle(a, plan, step);
}

}  // namespace VLLM_ISA
}  // namespace vllm_cpu
