"""Triton implementation of `rotary_embedding_`: one launch turns the heads of q and of k.

A program holds both halves of its heads before it writes either, because it works in place. It masks head
counts and angles that are no powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8


def rotary_embedding_(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    """Run the kernel. Arguments: `vllm.ops.rotary.rotary_embedding_`."""
    tokens, half = len(positions), cos_sin_cache.shape[1] // 2
    if not tokens or not half:
        return
    q_programs = triton.cdiv(q.shape[1], _HEADS)
    _rotary_kernel[(tokens, q_programs + triton.cdiv(k.shape[1], _HEADS))](
        positions,
        cos_sin_cache,
        cos_sin_cache.stride(0),
        half,
        q,
        q.stride(0),
        q.stride(1),
        q.shape[1],
        q_programs,
        k,
        k.stride(0),
        k.stride(1),
        k.shape[1],
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(half),
    )


@triton.jit
def _rotary_kernel(
    positions_ptr,  # int [T]
    cos_sin_ptr,  # float32 [max positions, 2 * half]
    cos_sin_stride,
    half,
    q_ptr,  # [T, q_heads, D]
    q_token_stride,
    q_head_stride,
    q_heads,
    q_programs,
    k_ptr,  # [T, k_heads, D]
    k_token_stride,
    k_head_stride,
    k_heads,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    angle = tl.arange(0, BLOCK)
    at = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + angle
    cos = tl.load(at, mask=angle < half, other=0.0)
    sin = tl.load(at + half, mask=angle < half, other=0.0)
    if part < q_programs:
        head = part * HEADS + tl.arange(0, HEADS)
        rotate_heads(q_ptr + token * q_token_stride, head, q_head_stride, q_heads, angle, half, cos, sin)
    else:
        head = (part - q_programs) * HEADS + tl.arange(0, HEADS)
        rotate_heads(k_ptr + token * k_token_stride, head, k_head_stride, k_heads, angle, half, cos, sin)


@triton.jit
def rotate_heads(token_ptr, head, head_stride, num_heads, angle, half, cos, sin):
    """Rotate one token's heads in place; returns their first and second halves as stored."""
    mask = (head < num_heads)[:, None] & (angle < half)[None, :]
    at = token_ptr + head[:, None] * head_stride + angle[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = token_ptr.dtype.element_ty
    rotated_first = (first * cos[None, :] - second * sin[None, :]).to(dtype)
    rotated_second = (second * cos[None, :] + first * sin[None, :]).to(dtype)
    tl.store(at, rotated_first, mask=mask)
    tl.store(at + half, rotated_second, mask=mask)
    return rotated_first, rotated_second
