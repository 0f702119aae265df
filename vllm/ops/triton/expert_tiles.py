"""Tiles of rows that are sorted by expert."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS, COLUMNS = 64, 64
"""The sizes of a product's tile, whatever the number of tokens, so that a token's bits do not depend on the others."""


def num_tiles(num_rows: int, num_experts: int) -> int:
    """The most that there can be: each expert's rows may fill one tile up less than whole."""
    return min(num_rows, num_rows // ROWS + num_experts)


# The expert of a tile, its first row among those that are sorted, and where that expert's end: none are left of a tile
# behind the last one.
@triton.jit
def rows_of_tile(tile, starts_ptr, num_experts, ROWS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr):
    experts = tl.arange(0, EXPERTS_BLOCK)
    inside = experts < num_experts
    begins = tl.load(starts_ptr + experts, mask=inside, other=0)
    ends = tl.load(starts_ptr + experts + 1, mask=inside, other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((inside & (tile_ends <= tile)).to(tl.int32), axis=0)
    is_own = experts == expert
    row = tl.sum(tl.where(is_own, begins + (tile - tile_ends + tiles) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(is_own, ends, 0), axis=0)
    return expert, row, end
