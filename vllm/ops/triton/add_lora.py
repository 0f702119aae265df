"""Triton implementations of `add_lora_` and `add_lora_embedding_`: rows by tiles of one adapter, first times A, then
times B. Tiles have one size and sums one order, so that a row's bits do not depend on the others."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.add_lora import RANK_GROUP
from vllm.ops.triton.expert_tiles import rows_of_tile

_ROWS, _COLUMNS = 16, 128


def add_lora_(
    out: Tensor,
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    borders: Tensor,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    num_adapters, groups, depth, _ = a.shape
    inner = torch.empty((len(out), groups * RANK_GROUP), dtype=torch.float32, device=out.device)
    if not len(out):
        return out
    _shrink_kernel[(_num_tiles(len(out), num_adapters), groups)](
        *(x, x.stride(0), order, starts, a, ranks, scales, inner, num_adapters, depth),
        PARTS=len(borders) - 1,
        GROUPS=groups,
        GROUP=RANK_GROUP,
        ROWS=_ROWS,
        DEPTH=64 if x.element_size() == 2 else 32,
        ADAPTERS_BLOCK=triton.next_power_of_2(num_adapters),
        WIDEN=triton.knobs.runtime.interpret and x.dtype == torch.bfloat16,
        num_warps=4,
    )
    _expand(out, inner, order, starts, b, ranks, borders, gain, shift)
    return out


def add_lora_embedding_(
    out: Tensor,
    ids: Tensor,
    order: Tensor,
    starts: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    borders: Tensor,
) -> Tensor:
    num_adapters, groups, num_ids, _ = a.shape
    inner = torch.empty((len(out), groups * RANK_GROUP), dtype=torch.float32, device=out.device)
    if not len(out):
        return out
    _look_up_kernel[(_num_tiles(len(out), num_adapters), groups)](
        *(ids, order, starts, a, scales, inner, num_adapters, num_ids),
        GROUPS=groups,
        GROUP=RANK_GROUP,
        ROWS=_ROWS,
        ADAPTERS_BLOCK=triton.next_power_of_2(num_adapters),
        num_warps=4,
    )
    _expand(out, inner, order, starts, b, ranks, borders, None, None)
    return out


def _num_tiles(num_rows: int, num_adapters: int) -> int:
    """The most that there can be."""
    return min(num_rows, num_rows // _ROWS + num_adapters)


def _expand(
    out: Tensor,
    inner: Tensor,
    order: Tensor,
    starts: Tensor,
    b: Tensor,
    ranks: Tensor,
    borders: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
) -> None:
    num_adapters, group_ranks, num_columns = b.shape
    parts = len(borders) - 1
    options: dict[str, Any] = dict(ROWS=_ROWS, COLUMNS=_COLUMNS, GROUP=RANK_GROUP, PARTS=parts)
    _expand_kernel[(_num_tiles(len(out), num_adapters), num_columns // _COLUMNS + parts)](
        *(out, out.stride(0), inner, order, starts, b, ranks, borders, gain, shift, num_adapters, num_columns),
        GROUP_RANKS=group_ranks,
        ADAPTERS_BLOCK=triton.next_power_of_2(num_adapters),
        PARTS_BLOCK=triton.next_power_of_2(parts),
        **options,
        num_warps=4,
    )


# x [T, K], order [T], starts [L + 1], a [L, GROUPS, K, GROUP], ranks and scales [L, PARTS], inner float32
# [T, GROUPS * GROUP], its rows in the order of `order`
@triton.jit(do_not_specialize_on_alignment=["x_ptr"])
def _shrink_kernel(
    x_ptr,
    x_stride,
    order_ptr,
    starts_ptr,
    a_ptr,
    ranks_ptr,
    scales_ptr,
    inner_ptr,
    num_adapters,
    num_depth,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    ADAPTERS_BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    adapter, first_row, end = rows_of_tile(tl.program_id(0), starts_ptr, num_adapters, ROWS, ADAPTERS_BLOCK)
    if first_row >= end:
        return
    group = tl.program_id(1)
    part = group // (GROUPS // PARTS)
    if group % (GROUPS // PARTS) * GROUP >= tl.load(ranks_ptr + adapter * PARTS + part):
        return
    at = first_row + tl.arange(0, ROWS)
    row = tl.load(order_ptr + tl.minimum(at, end - 1)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    rank = tl.arange(0, GROUP)
    left_ptr = x_ptr + row[:, None] * x_stride + depth[None, :]
    a_ptr += (adapter * GROUPS + group).to(tl.int64) * num_depth * GROUP
    right_ptr = a_ptr + depth[:, None] * GROUP + rank[None, :]
    sums = tl.zeros([ROWS, GROUP], dtype=tl.float32)
    for first in range(0, num_depth, DEPTH):
        inside = first + depth < num_depth
        left = tl.load(left_ptr, mask=inside[None, :], other=0.0)
        right = tl.load(right_ptr, mask=inside[:, None], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        left_ptr += DEPTH
        right_ptr += DEPTH * GROUP
    sums *= tl.load(scales_ptr + adapter * PARTS + part)
    out_ptr = inner_ptr + at.to(tl.int64)[:, None] * (GROUPS * GROUP) + group * GROUP + rank[None, :]
    tl.store(out_ptr, sums, mask=(at < end)[:, None])


# ids [T], a [L, GROUPS, V, GROUP], scales [L], inner as above
@triton.jit
def _look_up_kernel(
    ids_ptr,
    order_ptr,
    starts_ptr,
    a_ptr,
    scales_ptr,
    inner_ptr,
    num_adapters,
    num_ids,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ADAPTERS_BLOCK: tl.constexpr,
):
    adapter, first_row, end = rows_of_tile(tl.program_id(0), starts_ptr, num_adapters, ROWS, ADAPTERS_BLOCK)
    if first_row >= end:
        return
    group = tl.program_id(1)
    at = first_row + tl.arange(0, ROWS)
    rank = tl.arange(0, GROUP)
    ids = tl.load(ids_ptr + tl.load(order_ptr + tl.minimum(at, end - 1))).to(tl.int64)
    held = (ids >= 0) & (ids < num_ids)
    a_ptr += (adapter * GROUPS + group).to(tl.int64) * num_ids * GROUP
    values = tl.load(a_ptr + ids[:, None] * GROUP + rank[None, :], mask=held[:, None], other=0.0).to(tl.float32)
    values *= tl.load(scales_ptr + adapter)
    out_ptr = inner_ptr + at.to(tl.int64)[:, None] * (GROUPS * GROUP) + group * GROUP + rank[None, :]
    tl.store(out_ptr, values, mask=(at < end)[:, None])


# out [T, N], inner as above, b [L, GROUP_RANKS, N], borders [PARTS + 1], gain and shift float32 [L, N] or None
@triton.jit
def _expand_kernel(
    out_ptr,
    out_stride,
    inner_ptr,
    order_ptr,
    starts_ptr,
    b_ptr,
    ranks_ptr,
    borders_ptr,
    gain_ptr,
    shift_ptr,
    num_adapters,
    num_columns,
    GROUP_RANKS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADAPTERS_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    adapter, first_row, end = rows_of_tile(tl.program_id(0), starts_ptr, num_adapters, ROWS, ADAPTERS_BLOCK)
    if first_row >= end:
        return
    part, first_column, end_column = rows_of_tile(tl.program_id(1), borders_ptr, PARTS, COLUMNS, PARTS_BLOCK)
    if first_column >= end_column:
        return
    num_ranks = tl.load(ranks_ptr + adapter * PARTS + part)
    at = first_row + tl.arange(0, ROWS)
    row = tl.load(order_ptr + tl.minimum(at, end - 1)).to(tl.int64)
    column = first_column + tl.arange(0, COLUMNS)
    rank = tl.arange(0, GROUP)
    left_ptr = inner_ptr + at.to(tl.int64)[:, None] * (PARTS * GROUP_RANKS) + part * GROUP_RANKS + rank[None, :]
    b_ptr += adapter.to(tl.int64) * GROUP_RANKS * num_columns
    right_ptr = b_ptr + rank[:, None] * num_columns + column[None, :]
    own, within = at < end, column < end_column
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, num_ranks, GROUP):
        inside = first + rank < num_ranks
        left = tl.load(left_ptr, mask=own[:, None] & inside[None, :], other=0.0)
        right = tl.load(right_ptr, mask=inside[:, None] & within[None, :], other=0.0).to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        left_ptr += GROUP
        right_ptr += GROUP * num_columns
    mask = own[:, None] & within[None, :]
    out_ptr += row[:, None] * out_stride + column[None, :]
    before = tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    if shift_ptr is not None:
        sums += tl.load(shift_ptr + adapter * num_columns + column, mask=within, other=0.0)[None, :]
    if gain_ptr is not None:
        sums += before * tl.load(gain_ptr + adapter * num_columns + column, mask=within, other=0.0)[None, :]
    tl.store(out_ptr, (before + sums).to(out_ptr.dtype.element_ty), mask=mask)
