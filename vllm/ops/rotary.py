"""Rotary position embedding of queries and keys, alone and in one pass with the writing of new keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import dispatched
from vllm.ops.kv_cache import reshape_and_cache_


@dispatched
def rotary_embedding_(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate the first rot_dim values of each head of q and k in place by its token's angles, half against half.

    `positions` are int32 or int64 [T], below max_positions. `q` [T, Hq, D] and `k` [T, Hkv, D] are both float32,
    bfloat16 or float16, and may be views whose last dimension is contiguous. `cos_sin_cache` is float32 [max_positions,
    rot_dim], the cosines of rot_dim / 2 angles, then the sines.
    """
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    for heads in (q, k):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        # Both halves are computed before either is written: in float32 they are views of the heads themselves.
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        heads[..., : 2 * half] = rotated.to(heads.dtype)


@dispatched
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
    """`rotary_embedding_` of q and k, then `reshape_and_cache_` of k and v; their arguments."""
    rotary_embedding_(positions, q, k, cos_sin_cache)
    reshape_and_cache_(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
