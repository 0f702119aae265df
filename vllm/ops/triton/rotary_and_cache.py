"""Triton implementation of `rotary_and_cache_`: one launch rotates q and k and writes k and v into the cache.

A program has one token and a few heads of q, of k or of v. Keys go into the cache from the registers in which they
were rotated.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.triton.rotary import rotate_heads

_HEADS = 8


def rotary_and_cache_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Run the kernel. Arguments: `vllm.ops.rotary_and_cache.rotary_and_cache_`, the caches as `cache_rows` views
    them."""
    tokens, kv_heads, head_dim = k.shape
    if not tokens:
        return
    half = cos_sin_cache.shape[1] // 2
    q_programs, kv_programs = triton.cdiv(q.shape[1], _HEADS), triton.cdiv(kv_heads, _HEADS)
    _rotary_and_cache_kernel[(tokens, q_programs + 2 * kv_programs)](
        positions,
        cos_sin_cache,
        cos_sin_cache.stride(0),
        q,
        q.stride(0),
        q.stride(1),
        q.shape[1],
        q_programs,
        k,
        k.stride(0),
        k.stride(1),
        v,
        v.stride(0),
        v.stride(1),
        kv_heads,
        kv_programs,
        keys,
        *keys.stride(),
        values,
        *values.stride()[:3],
        slot_mapping,
        HALF=half,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=keys.shape[2],
        HEADS=_HEADS,
        ANGLES=max(1, triton.next_power_of_2(half)),
        DIMS=triton.next_power_of_2(head_dim),
    )


# Parts of one upload, each step at other places in it.
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
        tl.store(at + head[:, None] * values_head_stride + dim[None, :], v, mask=mask)
        return
    angle = tl.arange(0, ANGLES)
    at = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * cos_sin_stride + angle
    cos = tl.load(at, mask=angle < HALF, other=0.0)
    sin = tl.load(at + HALF, mask=angle < HALF, other=0.0)
    if part < q_programs:
        head = part * HEADS + tl.arange(0, HEADS)
        rotate_heads(q_ptr + token * q_token_stride, head, q_head_stride, q_heads, angle, HALF, cos, sin)
        return
    head = (part - q_programs) * HEADS + tl.arange(0, HEADS)
    k_ptr += token * k_token_stride
    first, second = rotate_heads(k_ptr, head, k_head_stride, kv_heads, angle, HALF, cos, sin)
    is_kept = (head < kept_heads)[:, None]
    at = keys_ptr + block * keys_block_stride + offset * keys_row_stride + head[:, None] * keys_head_stride
    mask = is_kept & (angle < HALF)[None, :]
    tl.store(at + angle[None, :] * keys_dim_stride, first, mask=mask)
    tl.store(at + (angle + HALF)[None, :] * keys_dim_stride, second, mask=mask)
    if 2 * HALF < HEAD_DIM:
        mask = is_kept & ((dim >= 2 * HALF) & (dim < HEAD_DIM))[None, :]
        rest = tl.load(k_ptr + head[:, None] * k_head_stride + dim[None, :], mask=mask)
        tl.store(at + dim[None, :] * keys_dim_stride, rest, mask=mask)
