"""Triton twin of `reshape_and_cache_`: a program writes one token's keys and values for a few heads.

A token's keys land block_size apart (see the layout in `vllm.ops.kv_cache`); neighbouring tokens of a step
fill the gaps while the lines are in the L2 cache. Negative slots are skipped on the device: filtering them
in the wrapper would wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 4


def reshape_and_cache_(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Run the kernel. Arguments: `vllm.ops.kv_cache.reshape_and_cache_`."""
    tokens, num_heads, head_dim = k.shape
    if not tokens:
        return
    _write_cache_kernel[(tokens, triton.cdiv(num_heads, _HEADS))](
        k,
        k.stride(0),
        k.stride(1),
        v,
        v.stride(0),
        v.stride(1),
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        head_dim,
        BLOCK_SIZE=k_cache.shape[2] // head_dim,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _write_cache_kernel(
    k_ptr,  # [T, heads, D]
    k_token_stride,
    k_head_stride,
    v_ptr,  # [T, heads, D]
    v_token_stride,
    v_head_stride,
    k_cache_ptr,  # [blocks, heads, D * BLOCK_SIZE]
    v_cache_ptr,  # [blocks, heads, BLOCK_SIZE * D]
    slot_mapping_ptr,  # int [T]
    num_heads,
    head_dim,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        dim = tl.arange(0, BLOCK)[None, :]
        mask = (head < num_heads) & (dim < head_dim)
        cell = (slot // BLOCK_SIZE * num_heads + head) * (head_dim * BLOCK_SIZE)
        offset = slot % BLOCK_SIZE
        keys = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=mask)
        tl.store(k_cache_ptr + cell + dim * BLOCK_SIZE + offset, keys, mask=mask)
        values = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        tl.store(v_cache_ptr + cell + offset * head_dim + dim, values, mask=mask)
