"""Triton implementation of `reshape_and_cache_`: a program writes one token's keys and values for a few heads.

Negative slots are skipped on the device: filtering them in the wrapper would wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vllm.ops.kv_cache import cache_rows
from vllm.ops.triton.float8 import KINDS, as_bytes, narrowed

_HEADS = 8


def reshape_and_cache_(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    tokens, num_heads, head_dim = k.shape
    if not tokens:
        return
    keys, values = map(as_bytes, cache_rows(k_cache, v_cache, head_dim))
    heads = k, *k.stride()[:2], v, *v.stride()[:2]
    caches = keys, *keys.stride(), values, *values.stride()[:3]
    sizes = dict(HEAD_DIM=head_dim, BLOCK_SIZE=keys.shape[2], HEADS=_HEADS, DIMS=triton.next_power_of_2(head_dim))
    sizes["FLOAT8"] = KINDS.get(k_cache.dtype, 0)
    grid = tokens, triton.cdiv(num_heads, _HEADS)
    _write_cache_kernel[grid](*heads, *caches, slot_mapping, num_heads, k_scale, v_scale, **sizes)


# A part of one upload, at another offset each step: do not compile for each alignment.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _write_cache_kernel(
    k_ptr,  # [T, heads, D]
    k_token_stride,
    k_head_stride,
    v_ptr,  # [T, heads, D]
    v_token_stride,
    v_head_stride,
    keys_ptr,  # [blocks, heads, BLOCK_SIZE, D]
    keys_block_stride,
    keys_head_stride,
    keys_row_stride,
    keys_dim_stride,
    values_ptr,  # [blocks, heads, BLOCK_SIZE, D]
    values_block_stride,
    values_head_stride,
    values_row_stride,
    slot_mapping_ptr,  # int [T]
    num_heads,
    k_scale,
    v_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        dim = tl.arange(0, DIMS)[None, :]
        mask = (head < num_heads) & (dim < HEAD_DIM)
        k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=mask)
        key_ptr = keys_ptr + block * keys_block_stride + offset * keys_row_stride
        tl.store(key_ptr + head * keys_head_stride + dim * keys_dim_stride, narrowed(k, k_scale, FLOAT8), mask=mask)
        v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        value_ptr = values_ptr + block * values_block_stride + offset * values_row_stride
        tl.store(value_ptr + head * values_head_stride + dim, narrowed(v, v_scale, FLOAT8), mask=mask)
