"""Rotary position embedding of queries and keys, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation


def rotary_embedding_(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate the first rot_dim values of each head of q and k by its token's angles, half against half.

    Args:
        positions: int32 or int64 [T], each below max_positions.
        q: float32, bfloat16 or float16 [T, Hq, D]; may be a view whose last dimension is contiguous.
        k: [T, Hkv, D], of q's dtype, likewise.
        cos_sin_cache: float32 [max_positions, rot_dim], the cosines of rot_dim / 2 angles, then the sines.
    """
    which = implementation(q)
    if which == "cpp":
        torch.ops.vllm_cpu.rotary_embedding_(positions, q, k, cos_sin_cache)
        return
    if which == "triton":
        from vllm.ops.triton import rotary as kernels

        kernels.rotary_embedding_(positions, q, k, cos_sin_cache)
        return
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for heads in (q, k):
        _rotate_reference_(heads, cos, sin)


def _rotate_reference_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[-1]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    # Both halves are computed before either is written: in float32 they are views of the heads themselves.
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads[..., : 2 * half] = rotated.to(heads.dtype)
