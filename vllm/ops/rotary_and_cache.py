"""Rotary position embedding and the writing of new keys and values, in one pass over the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation
from vllm.ops.kv_cache import cache_rows, reshape_and_cache_
from vllm.ops.rotary import rotary_embedding_


def rotary_and_cache_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """`rotary_embedding_` of q and k, then `reshape_and_cache_` of k and v; their arguments.

    Args:
        positions: int32 or int64 [T], each below max_positions.
        q: float32, bfloat16 or float16 [T, Hq, D]; may be a view whose last dimension is contiguous.
        k, v: [T, Hkv, D], of q's dtype, likewise.
        cos_sin_cache: float32 [max_positions, rot_dim], the cosines of rot_dim / 2 angles, then the sines.
        k_cache, v_cache: of q's dtype, contiguous and of `kv_cache_shape`, or of `kv_rows_shape` (not in C++).
        slot_mapping: int32 or int64 [T], distinct; a negative slot is skipped.
    """
    which = implementation(q)
    if which == "cpp":
        torch.ops.vllm_cpu.rotary_and_cache_(positions, q, k, v, cos_sin_cache, k_cache, v_cache, slot_mapping)
        return
    if which == "triton":
        from vllm.ops.triton import rotary_and_cache as kernels

        keys, values = cache_rows(k_cache, v_cache, k.shape[-1])
        kernels.rotary_and_cache_(positions, q, k, v, cos_sin_cache, keys, values, slot_mapping)
        return
    rotary_embedding_(positions, q, k, cos_sin_cache)
    reshape_and_cache_(k, v, k_cache, v_cache, slot_mapping)
