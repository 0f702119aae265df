"""Triton implementations of the norms: a row is read once, stays in registers, and is written once.

The kernel masks a hidden size that is no power of two. Short rows (a head's norm) share a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Values a program holds at least, and a warp at most.
_TILE = 1024
_VALUES_A_WARP = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Two strides reach the heads of a qkv row without a copy.
    heads = x if x.dim() == 3 else x[:, None]
    return _launch(heads, None, weight, eps).view(x.shape)


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x[:, None], residual, weight, eps).view(x.shape)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    tokens, num_heads, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = triton.next_power_of_2(hidden)
    rows = max(1, _TILE // block)
    stream = (x, 0) if residual is None else (residual, residual.stride(0))
    sizes = tokens * num_heads, num_heads, hidden, eps
    constants = dict(HAS_RESIDUAL=residual is not None, ROWS=rows, BLOCK=block)
    num_warps = min(16, max(4, block // _VALUES_A_WARP))
    grid = (triton.cdiv(tokens * num_heads, rows),)
    _rms_norm_kernel[grid](x, *x.stride()[:2], *stream, weight, out, *sizes, **constants, num_warps=num_warps)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,  # [T, heads, H]
    token_stride,
    head_stride,
    residual_ptr,  # [T, H], read if HAS_RESIDUAL (then heads is 1)
    residual_stride,
    weight_ptr,  # [H]
    out_ptr,  # [T, heads, H]
    num_rows,
    num_heads,
    hidden,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < hidden)[None, :]
    start = row // num_heads * token_stride + row % num_heads * head_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual_ptr + row[:, None] * residual_stride + column[None, :]
        total = (x + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(at, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    normed = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + row[:, None] * hidden + column[None, :], normed.to(out_ptr.dtype.element_ty), mask=mask)
