"""Triton implementation of `linear_readings`: a matrix product whose tiles are reduced in registers.

First the requested logits: a tile of the product for each column of ids or two, of which the weight rows are gathered
and the diagonals kept. They come from the loop that makes the other tiles, so a token with the same weight row has the
same bits in both, and ties are ties. A token's own column is left out by its id, so it never counts against itself.

Then a program a tile: its rows' maxima, sums of exponentials and argmax, and for each requested logit how many are
greater. These counts are added by integer atomics, whose order does not matter. Consecutive programs share a slice of
the weight and go through all rows of hidden states, which the L2 cache holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128
_DEPTH = 64
_NUM_STAGES = 3
# Up to this size a Hopper's processor has two programs, of which one multiplies while the other reduces its tile.
_SMALL_HIDDEN_SIZE = 2048
# Hidden states that the L2 cache holds; with more, the partial results would also be large.
_MAX_ROWS = 8192

Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def linear_readings(hidden: Tensor, weight: Tensor, token_ids: Tensor, num_token_ids: Tensor | None) -> Result:
    valid = None
    if num_token_ids is not None:
        valid = torch.arange(token_ids.shape[1], device=token_ids.device) < num_token_ids[:, None]
        token_ids = token_ids.masked_fill(~valid, 0)
    parts = [
        _read_rows(hidden[first : first + _MAX_ROWS], weight, token_ids[first : first + _MAX_ROWS])
        for first in range(0, max(1, len(hidden)), _MAX_ROWS)
    ]
    chosen, ranks, lse, argmax, highest = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    if valid is not None:
        chosen.masked_fill_(~valid, 0.0)
        ranks.masked_fill_(~valid, 0)
    return chosen, ranks, lse, argmax, highest


def _tile(hidden_size: int) -> tuple[int, int]:
    """Columns of a tile, and warps of a program. 256 columns keep a Hopper's matrix units busy, and take all registers
    of a processor; 128 with 4 warps take half of them. Other GPUs lack the registers for 256, as Hopper does for the
    masks of a hidden size that is no multiple of the loop's step."""
    if triton.knobs.runtime.interpret or hidden_size % _DEPTH:
        return 128, 8
    if triton.runtime.driver.active.get_current_target().arch // 10 != 9:
        return 128, 8
    return (128, 4) if hidden_size <= _SMALL_HIDDEN_SIZE else (256, 8)


def _read_rows(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Result:
    num_rows, hidden_size = hidden.shape
    vocab_size, num_columns = len(weight), token_ids.shape[1]
    is_even = hidden_size % _DEPTH == 0
    tile_columns, num_warps = _tile(hidden_size)
    num_tiles = triton.cdiv(vocab_size, tile_columns)
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
    tile = dict(ROWS=_ROWS, COLUMNS=tile_columns, DEPTH=_DEPTH, IS_EVEN=is_even, WIDEN=widen)
    constants = dict(**tile, num_warps=num_warps, num_stages=_NUM_STAGES)
    product = (hidden, hidden.stride(0), num_rows, weight, weight.stride(0), vocab_size, hidden_size)
    if chosen.numel():
        grid = (num_row_tiles, triton.cdiv(num_columns, tile_columns // _ROWS))
        _chosen_logits_kernel[grid](*product, ids, num_columns, chosen, **constants)
    if num_rows:
        _linear_readings_kernel[(num_row_tiles, num_tiles)](
            *product, ids, num_columns, chosen, counts, maxima, sums, argmaxima, **constants
        )
    highest = maxima.amax(dim=0)
    base = highest.masked_fill(highest.isinf(), 0.0)
    lse = (sums * (maxima - base).exp()).sum(dim=0).log() + base
    # No column equals a NaN maximum.
    argmax = argmaxima.masked_fill(maxima != highest, vocab_size - 1).amin(dim=0).clamp_(max=vocab_size - 1)
    return chosen.t().contiguous(), (1 + counts).t().contiguous(), lse, argmax, highest


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
    counts_ptr,  # int32 [W, R], zeros
    maxima_ptr,  # float32 [tiles, R]
    sums_ptr,  # float32 [tiles, R]
    argmaxima_ptr,  # int32 [tiles, R]
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    row_inside = tl.minimum(rows, num_rows - 1)
    id_inside = tl.minimum(column, vocab_size - 1)
    logits = _product(
        hidden_ptr, hidden_stride, row_inside, weight_ptr, weight_stride, id_inside, hidden_size, DEPTH, IS_EVEN, WIDEN
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
    argmax = tl.min(tl.where(logits == highest[:, None], column[None, :], vocab_size), axis=1)
    tl.store(argmaxima_ptr + rows, argmax, mask=inside)
    for _ in tl.range(0, num_columns, num_stages=1):
        own = tl.load(ids_ptr + rows, mask=inside, other=0)
        threshold = tl.load(chosen_ptr + rows, mask=inside, other=float("inf"))
        is_greater = logits > threshold[:, None]
        above = tl.sum(is_greater.to(tl.int32), axis=1)
        if tl.max((own // COLUMNS == tile).to(tl.int32), axis=0) > 0:
            own_logit = tl.max(tl.where(column[None, :] == own[:, None], logits, float("-inf")), axis=1)
            above -= (own_logit > threshold).to(tl.int32)
        tl.atomic_add(counts_ptr + rows, above, mask=inside & (above > 0), sem="relaxed")
        ids_ptr += num_rows
        chosen_ptr += num_rows
        counts_ptr += num_rows
