"""Triton implementation of `invariant_linear`: tiles of one size, whatever the number of rows, each a loop over K."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 64, 64


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, float_out: bool) -> Tensor:
    rows, depth = x.shape
    out = torch.empty((rows, len(weight)), dtype=torch.float32 if float_out else x.dtype, device=x.device)
    if out.numel():
        # Consecutive programs share a slice of the weight.
        grid = triton.cdiv(rows, _ROWS), triton.cdiv(len(weight), _COLUMNS)
        widen = triton.knobs.runtime.interpret and x.dtype == torch.bfloat16
        # Deeper tiles of float32, which has no matrix units, spill registers.
        tile = dict(ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=64 if x.element_size() == 2 else 32, WIDEN=widen)
        product = x, x.stride(0), weight, weight.stride(0), bias, out, rows, len(weight), depth
        _invariant_linear_kernel[grid](*product, **tile, num_warps=4, num_stages=3)
    return out


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x_ptr"])
def _invariant_linear_kernel(
    x_ptr,  # [T, K]
    x_stride,
    weight_ptr,  # [N, K]
    weight_stride,
    bias_ptr,  # [N], or None
    out_ptr,  # [T, N]
    num_rows,
    num_columns,
    num_depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left_ptr = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * x_stride + depth[None, :]
    right_ptr = weight_ptr + tl.minimum(column, num_columns - 1).to(tl.int64)[None, :] * weight_stride + depth[:, None]
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, num_depth, DEPTH):
        inside = first + depth < num_depth
        left = tl.load(left_ptr, mask=inside[None, :], other=0.0)
        right = tl.load(right_ptr, mask=inside[:, None], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        left_ptr += DEPTH
        right_ptr += DEPTH
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=mask)
