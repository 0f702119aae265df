"""One kernel for RMSNorm and LayerNorm: a row is read once, stays in registers, and is written once.

It masks a hidden size that is no power of two. Short rows (a head's norm) share a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Values a program holds at least, and a warp at most.
_TILE = 1024
_VALUES_A_WARP = 1024


def launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> Tensor:
    """The norm of x [T, H] or [T, heads, H], of that shape, contiguous; LayerNorm if `centered`. Of x [T, H],
    `residual` [T, H] may be what x is added to first, in place. `weight` and `bias` are [H] or [heads, H]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    # Two strides reach the heads of a qkv row without a copy.
    heads = x if x.dim() == 3 else x[:, None]
    tokens, num_heads, hidden = heads.shape
    block = triton.next_power_of_2(hidden)
    rows = max(1, _TILE // block)
    stream = (x, 0) if residual is None else (residual, residual.stride(0))
    tensors = heads, *heads.stride()[:2], *stream, weight, bias, out
    given = dict(
        CENTERED=centered,
        HAS_RESIDUAL=residual is not None,
        BY_HEAD=any(each is not None and each.dim() == 2 for each in (weight, bias)),
    )
    sizes = tokens * num_heads, num_heads, hidden, eps
    num_warps = min(16, max(4, block // _VALUES_A_WARP))
    grid = (triton.cdiv(tokens * num_heads, rows),)
    _norm_kernel[grid](*tensors, *sizes, **given, ROWS=rows, BLOCK=block, num_warps=num_warps)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr,  # [T, heads, H]
    token_stride,
    head_stride,
    residual_ptr,  # [T, H], read if HAS_RESIDUAL (then heads is 1)
    residual_stride,
    weight_ptr,  # [H], or [heads, H] if BY_HEAD; or None
    bias_ptr,  # the same
    out_ptr,  # [T, heads, H]
    num_rows,
    num_heads,
    hidden,
    eps,
    CENTERED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BY_HEAD: tl.constexpr,
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
    if CENTERED:
        mean = tl.sum(x, axis=1) / hidden
        x = tl.where(mask, x - mean[:, None], 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)[:, None]
    if BY_HEAD:
        place = (row % num_heads * hidden)[:, None] + column[None, :]
        is_value = mask
    else:
        place = column[None, :]
        is_value = (column < hidden)[None, :]
    if weight_ptr is not None:
        normed = normed * tl.load(weight_ptr + place, mask=is_value, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        normed = normed + tl.load(bias_ptr + place, mask=is_value, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * hidden + column[None, :], normed.to(out_ptr.dtype.element_ty), mask=mask)
