"""Triton implementation of `linear_readings`: a matrix product whose tiles are reduced in registers.

First the requested logits: a tile of the product for each column of ids or two, of which the weight rows are gathered
and the diagonals kept. They come from the loop that makes the other tiles, so a token with the same weight row has the
same bits in both, and ties are ties. A token's column is left out by its id, so it never counts against itself.

Then a program a tile: its rows' maxima, sums of exponentials and argmax, and for each requested logit how many are
greater. These counts are added by integer atomics, whose order does not matter. Consecutive programs share a slice of
the weight and go through all rows of hidden states, which the L2 cache holds.

From Hopper on these programs fetch their tiles by descriptors, if matrices are aligned. That leaves so many registers
that two programs with all eight warps share a processor. What a descriptor fetches is multiplied in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton import descriptors

_ROWS = 128
_DEPTH = 64
# Up to this hidden size a Hopper's processor has two programs: one multiplies while the other reduces its tile. Of 256
# columns that hides the reduction and the next product's start, some 7,000 cycles (2,150 instructions a warp, two warps
# a scheduler, and the way of the first tiles), and fetches 256 bytes more for each unit of the hidden size, of which
# the L2 cache gives a processor some 36 a cycle.
_SMALL_HIDDEN_SIZE = 1024
# Hidden states that the L2 cache holds; with more, the partial results would also be large.
_MAX_ROWS = 8192

Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def linear_readings(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, num_token_ids: Tensor | None, ranked: bool = True
) -> Result:
    valid = None
    if num_token_ids is not None:
        valid = torch.arange(token_ids.shape[1], device=token_ids.device) < num_token_ids[:, None]
        token_ids = token_ids.masked_fill(~valid, 0)
    # The kernel numbers the requested logits of a part by 32 bits.
    size = min(_MAX_ROWS, (2**31 - 1) // max(1, token_ids.shape[1]))
    parts = [
        _read_rows(hidden[first : first + size], weight, token_ids[first : first + size], ranked)
        for first in range(0, max(1, len(hidden)), size)
    ]
    chosen, ranks, lse, argmax, highest = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    if valid is not None:
        chosen.masked_fill_(~valid, 0.0)
        ranks.masked_fill_(~valid, 0)
    return chosen, ranks, lse, argmax, highest


class _Tile(NamedTuple):
    """Columns, and how a program is launched that computes addresses, or is given descriptors."""

    columns: int
    plain: dict[str, int]
    described: dict[str, int]


def _tile(hidden_size: int) -> _Tile:
    """256 columns keep a Hopper's matrix units busy, and take all registers of a processor. Other GPUs lack the
    registers for so many, as Hopper does for the masks of a hidden size that is no multiple of the loop's step."""
    eight, four = {"num_warps": 8, "num_stages": 3}, {"num_warps": 4, "num_stages": 3}
    if triton.knobs.runtime.interpret or descriptors.architecture() // 10 != 9:
        return _Tile(128, eight, four)
    # Without addresses there are registers for two programs of eight warps.
    pair = eight | {"maxnreg": 128}
    if hidden_size % _DEPTH:
        return _Tile(128, eight, pair)
    if hidden_size <= _SMALL_HIDDEN_SIZE:
        return _Tile(128, four, pair)
    return _Tile(256, eight, eight | {"num_stages": 4})


def _read_rows(hidden: Tensor, weight: Tensor, token_ids: Tensor, ranked: bool) -> Result:
    num_rows, hidden_size = hidden.shape
    vocab_size, num_columns = len(weight), token_ids.shape[1]
    tile = _tile(hidden_size)
    num_tiles = triton.cdiv(vocab_size, tile.columns)
    num_row_tiles = triton.cdiv(num_rows, _ROWS)
    device = hidden.device
    # Rows last: neighbouring threads take neighbouring rows.
    ids = token_ids.t().contiguous()
    chosen = torch.empty((num_columns, num_rows), dtype=torch.float32, device=device)
    counts = torch.zeros((num_columns, num_rows), dtype=torch.int32, device=device)
    maxima = torch.empty((num_tiles, num_rows), dtype=torch.float32, device=device)
    sums = torch.empty((num_tiles, num_rows), dtype=torch.float32, device=device)
    argmaxima = torch.empty((num_tiles, num_rows), dtype=torch.int32, device=device)
    # The interpreter computes with NumPy, which has no bfloat16.
    widen = triton.knobs.runtime.interpret and hidden.dtype == torch.bfloat16
    constants = dict(ROWS=_ROWS, COLUMNS=tile.columns, DEPTH=_DEPTH, IS_EVEN=hidden_size % _DEPTH == 0, WIDEN=widen)
    product = (hidden, hidden.stride(0), num_rows, weight, weight.stride(0), vocab_size, hidden_size)
    if chosen.numel():
        grid = (num_row_tiles, triton.cdiv(num_columns, tile.columns // _ROWS))
        _chosen_logits_kernel[grid](*product, ids, num_columns, chosen, **constants, **tile.plain)
    if num_rows:
        rest = (ids, num_columns, chosen, counts, maxima, sums, argmaxima)
        _launch(product, rest, constants | {"RANKS": ranked}, tile, (num_row_tiles, num_tiles))
    highest = maxima.amax(dim=0)
    base = highest.masked_fill(highest.isinf(), 0.0)
    lse = (sums * (maxima - base).exp()).sum(dim=0).log() + base
    # No column equals a NaN maximum.
    argmax = argmaxima.masked_fill(maxima != highest, vocab_size - 1).amin(dim=0).clamp_(max=vocab_size - 1)
    ranks = 1 + counts if ranked else counts
    return chosen.t().contiguous(), ranks.t().contiguous(), lse, argmax, highest


def _launch(product: tuple, rest: tuple, constants: dict, tile: _Tile, grid: tuple[int, int]) -> None:
    hidden, weight = product[0], product[3]

    def launch_described() -> None:
        left, right = descriptors.describe(hidden, _ROWS, _DEPTH), descriptors.describe(weight, tile.columns, _DEPTH)
        arguments = left, *product[1:3], right, *product[4:], *rest
        _linear_readings_kernel[grid](*arguments, **constants, DESCRIBED=True, **tile.described)

    is_described = descriptors.are_fetched() and descriptors.can_describe(hidden) and descriptors.can_describe(weight)
    if not (is_described and _DESCRIBED.launch(launch_described)):
        _linear_readings_kernel[grid](*product, *rest, **constants, DESCRIBED=False, **tile.plain)


_DESCRIBED = descriptors.Variant("Reading logits from tiles that are fetched by descriptors")


@triton.jit
def _product(
    hidden_ptr,
    hidden_stride,
    rows,
    weight_ptr,
    weight_stride,
    weight_rows,
    hidden_size,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """float32 [ROWS, COLUMNS]: hidden[rows] times the transpose of weight[weight_rows]."""
    depth = tl.arange(0, DEPTH)
    left_ptr = hidden_ptr + rows.to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    right_ptr = weight_ptr + weight_rows.to(tl.int64)[None, :] * weight_stride + depth[:, None]
    sums = tl.zeros([rows.shape[0], weight_rows.shape[0]], dtype=tl.float32)
    for first in range(0, hidden_size, DEPTH):
        if IS_EVEN:
            left = tl.load(left_ptr)
            right = tl.load(right_ptr)
        else:
            left = tl.load(left_ptr, mask=(first + depth < hidden_size)[None, :], other=0.0)
            right = tl.load(right_ptr, mask=(first + depth < hidden_size)[:, None], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums = tl.dot(left, right, sums)
        left_ptr += DEPTH
        right_ptr += DEPTH
    return sums


@triton.jit
def _described_product(
    hidden,
    first_row,
    weight,
    first_weight_row,
    hidden_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """float32 [ROWS, COLUMNS]: as _product, of consecutive rows. Those past the last one are zeros."""
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, hidden_size, DEPTH):
        left = hidden.load([first_row, first])
        right = weight.load([first_weight_row, first])
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums = tl.dot(left, right.T, sums)
    return sums


@triton.jit(do_not_specialize=["num_rows", "num_columns"], do_not_specialize_on_alignment=["ids_ptr"])
def _chosen_logits_kernel(
    hidden_ptr,  # [R, H]
    hidden_stride,
    num_rows,
    weight_ptr,  # [V, H]
    weight_stride,
    vocab_size,
    hidden_size,
    ids_ptr,  # int32 [W, R]
    num_columns,
    chosen_ptr,  # float32 [W, R]
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # A tile's columns are the ids of its rows in one column of ids, then in the next.
    first_row = tl.program_id(0) * ROWS
    first_wanted = tl.program_id(1) * (COLUMNS // ROWS)
    place = tl.arange(0, COLUMNS)
    row_of_place = first_row + place % ROWS
    wanted = first_wanted + place // ROWS
    is_valid = (row_of_place < num_rows) & (wanted < num_columns)
    ids = tl.load(ids_ptr + wanted.to(tl.int64) * num_rows + row_of_place, mask=is_valid, other=0)
    rows = first_row + tl.arange(0, ROWS)
    row_inside = tl.minimum(rows, num_rows - 1)
    sums = _product(
        hidden_ptr, hidden_stride, row_inside, weight_ptr, weight_stride, ids, hidden_size, DEPTH, IS_EVEN, WIDEN
    )
    for each in tl.static_range(COLUMNS // ROWS):
        is_own = place[None, :] == each * ROWS + tl.arange(0, ROWS)[:, None]
        own = tl.sum(tl.where(is_own, sums, 0.0), axis=1)
        column = first_wanted + each
        num_stored = tl.where(column < num_columns, num_rows, 0)
        tl.store(chosen_ptr + column.to(tl.int64) * num_rows + rows, own, mask=rows < num_stored)


@triton.jit(do_not_specialize=["num_rows", "num_columns"], do_not_specialize_on_alignment=["ids_ptr"])
def _linear_readings_kernel(
    hidden_ptr,  # [R, H], or its descriptor
    hidden_stride,
    num_rows,
    weight_ptr,  # [V, H], or its descriptor
    weight_stride,
    vocab_size,
    hidden_size,
    ids_ptr,  # int32 [W, R]
    num_columns,
    chosen_ptr,  # float32 [W, R]
    counts_ptr,  # int32 [W, R], zeros
    maxima_ptr,  # float32 [tiles, R]
    sums_ptr,  # float32 [tiles, R]
    argmaxima_ptr,  # int32 [tiles, R]
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
    DESCRIBED: tl.constexpr,
    RANKS: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, COLUMNS)
    column = tile * COLUMNS + place
    if DESCRIBED:
        first_row = tl.program_id(0) * ROWS
        logits = _described_product(
            hidden_ptr, first_row, weight_ptr, tile * COLUMNS, hidden_size, ROWS, COLUMNS, DEPTH, WIDEN
        )
    else:
        row_inside = tl.minimum(rows, num_rows - 1)
        id_inside = tl.minimum(column, vocab_size - 1)
        logits = _product(
            hidden_ptr,
            hidden_stride,
            row_inside,
            weight_ptr,
            weight_stride,
            id_inside,
            hidden_size,
            DEPTH,
            IS_EVEN,
            WIDEN,
        )
    logits = tl.where((column < vocab_size)[None, :], logits, float("-inf"))
    inside = rows < num_rows
    maxima_ptr += tile.to(tl.int64) * num_rows
    sums_ptr += tile.to(tl.int64) * num_rows
    argmaxima_ptr += tile.to(tl.int64) * num_rows
    highest = tl.max(logits, axis=1)
    tl.store(maxima_ptr + rows, highest, mask=inside)
    # An infinite maximum must not be subtracted from itself.
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    weights = tl.exp2((logits - base[:, None]) * LOG2_E)
    tl.store(sums_ptr + rows, tl.sum(weights, axis=1), mask=inside)
    argmax = tl.min(tl.where(logits == highest[:, None], place[None, :], COLUMNS), axis=1)
    tl.store(argmaxima_ptr + rows, tile * COLUMNS + argmax, mask=inside)
    num_counted = num_columns if RANKS else 0
    for index in tl.range(0, num_counted, num_stages=1):
        first = index * num_rows
        threshold = tl.load(chosen_ptr + first + rows, mask=inside, other=float("inf"))
        above = tl.sum((logits > threshold[:, None]).to(tl.int32), axis=1)
        tl.atomic_add(counts_ptr + first + rows, above, mask=inside & (above > 0), sem="relaxed")
    # Seldom anything to do; in a loop of its own, which leaves the first one more registers.
    for index in tl.range(0, num_counted, num_stages=1):
        first = index * num_rows
        own = tl.load(ids_ptr + first + rows, mask=inside, other=0)
        if tl.max((own // COLUMNS == tile).to(tl.int32), axis=0) > 0:
            threshold = tl.load(chosen_ptr + first + rows, mask=inside, other=float("inf"))
            is_own = place[None, :] == (own - tile * COLUMNS)[:, None]
            own_logit = tl.max(tl.where(is_own, logits, float("-inf")), axis=1)
            tl.atomic_add(counts_ptr + first + rows, -1, mask=inside & (own_logit > threshold), sem="relaxed")
