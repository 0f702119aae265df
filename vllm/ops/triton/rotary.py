"""Triton implementations of `rotary_embedding_` and `rotary_and_cache_`: one launch rotates the heads of q and k, and
the second also writes k and v into the cache, keys from the registers in which they were rotated.

A program has one token and a few heads. It holds both halves of its heads before it writes either, because it works in
place. It masks head counts and angles that are no powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.kv_cache import cache_rows
from vllm.ops.triton.float8 import KINDS, as_bytes, narrowed

_HEADS = 8


def rotary_embedding_(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    tokens, half = len(positions), cos_sin_cache.shape[1] // 2
    if not tokens or not half:
        return
    q_programs = triton.cdiv(q.shape[1], _HEADS)
    queries = q, *q.stride()[:2], q.shape[1], q_programs
    angles = positions, cos_sin_cache, cos_sin_cache.stride(0), half
    keys = k, *k.stride()[:2], k.shape[1]
    grid = tokens, q_programs + triton.cdiv(k.shape[1], _HEADS)
    _rotary_kernel[grid](*angles, *queries, *keys, HEADS=_HEADS, BLOCK=triton.next_power_of_2(half))


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
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
        _rotate_heads(q_ptr + token * q_token_stride, head, q_head_stride, q_heads, angle, half, cos, sin)
    else:
        head = (part - q_programs) * HEADS + tl.arange(0, HEADS)
        _rotate_heads(k_ptr + token * k_token_stride, head, k_head_stride, k_heads, angle, half, cos, sin)


@triton.jit
def _rotate_heads(token_ptr, head, head_stride, num_heads, angle, half, cos, sin):
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


def rotary_and_cache_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    tokens, kv_heads, head_dim = k.shape
    if not tokens:
        return
    keys, values = map(as_bytes, cache_rows(k_cache, v_cache, head_dim))
    half = cos_sin_cache.shape[1] // 2
    q_programs, kv_programs = triton.cdiv(q.shape[1], _HEADS), triton.cdiv(kv_heads, _HEADS)
    angles = positions, cos_sin_cache, cos_sin_cache.stride(0)
    queries = q, *q.stride()[:2], q.shape[1], q_programs
    new = k, *k.stride()[:2], v, *v.stride()[:2], kv_heads, kv_programs
    caches = keys, *keys.stride(), values, *values.stride()[:3]
    sizes = dict(HALF=half, HEAD_DIM=head_dim, BLOCK_SIZE=keys.shape[2], HEADS=_HEADS)
    padded = dict(ANGLES=max(1, triton.next_power_of_2(half)), DIMS=triton.next_power_of_2(head_dim))
    scales = k_scale, v_scale, KINDS.get(k_cache.dtype, 0)
    grid = tokens, q_programs + 2 * kv_programs
    _rotary_and_cache_kernel[grid](*angles, *queries, *new, *caches, slot_mapping, *scales, **sizes, **padded)


# Parts of one upload, at other offsets each step: do not compile for each alignment.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _rotary_and_cache_kernel(
    positions_ptr,  # int [T]
    cos_sin_ptr,  # float32 [max positions, 2 * HALF]
    cos_sin_stride,
    q_ptr,  # [T, q_heads, D]
    q_token_stride,
    q_head_stride,
    q_heads,
    q_programs,
    k_ptr,  # [T, kv_heads, D]
    k_token_stride,
    k_head_stride,
    v_ptr,  # [T, kv_heads, D]
    v_token_stride,
    v_head_stride,
    kv_heads,
    kv_programs,
    keys_ptr,  # [blocks, kv_heads, BLOCK_SIZE, D]
    keys_block_stride,
    keys_head_stride,
    keys_row_stride,
    keys_dim_stride,
    values_ptr,  # [blocks, kv_heads, BLOCK_SIZE, D]
    values_block_stride,
    values_head_stride,
    values_row_stride,
    slot_mapping_ptr,  # int [T]
    k_scale,
    v_scale,
    FLOAT8: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    ANGLES: tl.constexpr,
    DIMS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    # No head of a token without a slot is written.
    kept_heads = tl.where(slot >= 0, kv_heads, 0)
    dim = tl.arange(0, DIMS)
    if part >= q_programs + kv_programs:
        head = (part - q_programs - kv_programs) * HEADS + tl.arange(0, HEADS)
        mask = (head < kept_heads)[:, None] & (dim < HEAD_DIM)[None, :]
        v = tl.load(v_ptr + token * v_token_stride + head[:, None] * v_head_stride + dim[None, :], mask=mask)
        at = values_ptr + block * values_block_stride + offset * values_row_stride
        tl.store(at + head[:, None] * values_head_stride + dim[None, :], narrowed(v, v_scale, FLOAT8), mask=mask)
        return
    angle = tl.arange(0, ANGLES)
    at = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + angle
    cos = tl.load(at, mask=angle < HALF, other=0.0)
    sin = tl.load(at + HALF, mask=angle < HALF, other=0.0)
    if part < q_programs:
        head = part * HEADS + tl.arange(0, HEADS)
        _rotate_heads(q_ptr + token * q_token_stride, head, q_head_stride, q_heads, angle, HALF, cos, sin)
        return
    head = (part - q_programs) * HEADS + tl.arange(0, HEADS)
    k_ptr += token * k_token_stride
    first, second = _rotate_heads(k_ptr, head, k_head_stride, kv_heads, angle, HALF, cos, sin)
    is_kept = (head < kept_heads)[:, None]
    at = keys_ptr + block * keys_block_stride + offset * keys_row_stride + head[:, None] * keys_head_stride
    mask = is_kept & (angle < HALF)[None, :]
    tl.store(at + angle[None, :] * keys_dim_stride, narrowed(first, k_scale, FLOAT8), mask=mask)
    tl.store(at + (angle + HALF)[None, :] * keys_dim_stride, narrowed(second, k_scale, FLOAT8), mask=mask)
    if 2 * HALF < HEAD_DIM:
        mask = is_kept & ((dim >= 2 * HALF) & (dim < HEAD_DIM))[None, :]
        rest = tl.load(k_ptr + head[:, None] * k_head_stride + dim[None, :], mask=mask)
        tl.store(at + dim[None, :] * keys_dim_stride, narrowed(rest, k_scale, FLOAT8), mask=mask)
