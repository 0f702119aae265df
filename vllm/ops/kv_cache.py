"""The paged key/value cache: its layout, and the writing of new tokens.

A cache is [num_blocks, num_kv_heads, block_size * head_dim]: one cell a (block, head). In the key cache a
cell is [head_dim, block_size], in the value cache [block_size, head_dim]. So attention reads both along
memory: scores of neighbouring tokens come from one vector of keys for each dimension, with no reduction
across lanes, and outputs from one vector of dimensions for each token. A slot is block * block_size + offset
in the block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Shape of a layer's key cache, and of its value cache."""
    return (num_blocks, num_kv_heads, block_size * head_dim)


def reshape_and_cache_(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's keys and values into its slot.

    Args:
        k, v: [T, Hkv, D], of the caches' dtype; may be views whose last dimension is contiguous.
        k_cache, v_cache: contiguous, of `kv_cache_shape`.
        slot_mapping: int32 or int64 [T], distinct; a negative slot is skipped.
    """
    which = implementation(k)
    if which == "cpp":
        torch.ops.vllm_cpu.reshape_and_cache_(k, v, k_cache, v_cache, slot_mapping)
        return
    if which == "triton":
        from vllm.ops.triton import kv_cache as kernels

        kernels.reshape_and_cache_(k, v, k_cache, v_cache, slot_mapping)
        return
    keys, values = cache_views(k_cache, v_cache, k.shape[-1])
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block_size = keys.shape[-1]
    blocks, offsets = slots // block_size, slots % block_size
    keys[blocks, :, :, offsets] = k[kept]
    values[blocks, :, offsets] = v[kept]


def cache_views(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The caches with their cells unfolded: keys [N, Hkv, D, block_size], values [N, Hkv, block_size, D]."""
    return k_cache.unflatten(-1, (head_dim, -1)), v_cache.unflatten(-1, (-1, head_dim))
