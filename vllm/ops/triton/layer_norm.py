"""Triton implementations of the layer norms: a row is read once, stays in registers, and is written once.

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


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    # Two strides reach the heads of a qkv row without a copy.
    heads = x if x.dim() == 3 else x[:, None]
    return _launch(heads, None, weight, bias, eps).view(x.shape)


def fused_add_layer_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return _launch(x[:, None], residual, weight, bias, eps).view(x.shape)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    tokens, num_heads, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = triton.next_power_of_2(hidden)
    rows = max(1, _TILE // block)
    stream = (x, 0) if residual is None else (residual, residual.stride(0))
    weights = x if weight is None else weight, x if bias is None else bias
    has_heads = any(each is not None and each.dim() == 2 for each in (weight, bias))
    sizes = tokens * num_heads, num_heads, hidden, hidden if has_heads else 0, eps
    given = dict(HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None)
    num_warps = min(16, max(4, block // _VALUES_A_WARP))
    grid = (triton.cdiv(tokens * num_heads, rows),)
    tensors = x, *x.stride()[:2], *stream, *weights, out
    _layer_norm_kernel[grid](*tensors, *sizes, **given, ROWS=rows, BLOCK=block, num_warps=num_warps)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_kernel(
    x_ptr,  # [T, heads, H]
    token_stride,
    head_stride,
    residual_ptr,  # [T, H], read if HAS_RESIDUAL (then heads is 1)
    residual_stride,
    weight_ptr,  # [H], or [heads, H], read if HAS_WEIGHT
    bias_ptr,  # the same, read if HAS_BIAS
    out_ptr,  # [T, heads, H]
    num_rows,
    num_heads,
    hidden,
    weight_stride,  # from head to head
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    mean = tl.sum(x, axis=1) / hidden
    difference = tl.where(mask, x - mean[:, None], 0.0)
    normed = difference * tl.rsqrt(tl.sum(difference * difference, axis=1) / hidden + eps)[:, None]
    place = (row % num_heads * weight_stride)[:, None] + column[None, :]
    if HAS_WEIGHT:
        normed = normed * tl.load(weight_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed = normed + tl.load(bias_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * hidden + column[None, :], normed.to(out_ptr.dtype.element_ty), mask=mask)
