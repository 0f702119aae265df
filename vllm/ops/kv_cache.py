"""The paged key/value cache: its layouts, and the writing of new tokens.

A slot is block * block_size + offset in the block. There are two layouts, and every operation takes both:

- Cells, for the CPU: [num_blocks, num_kv_heads, block_size * head_dim], one cell a (block, head). In the key cache a
  cell is [head_dim, block_size], in the value cache [block_size, head_dim]. So scores of neighbouring tokens come from
  one vector of keys for each dimension, with no reduction across lanes.
- Rows, for GPUs: [num_blocks, num_kv_heads, block_size, head_dim], keys and values alike. Only the last dimension has
  to be contiguous, so [num_blocks, block_size, num_kv_heads, head_dim] with its middle dimensions exchanged will do.

A cache has the dtype of the keys and values, or one of 8-bit floats (`FLOAT8`): it holds `as_cached` of them then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import dispatched

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Shape of a layer's key cache, and of its value cache, in cells."""
    return (num_blocks, num_kv_heads, block_size * head_dim)


def kv_rows_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of a layer's key cache, and of its value cache, in rows."""
    return (num_blocks, num_kv_heads, block_size, head_dim)


@dispatched
def reshape_and_cache_(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write the keys and values k, v [T, Hkv, D] into their tokens' slots.

    `k` and `v` have the caches' dtype, or these are `FLOAT8`, and may be views whose last dimension is contiguous. The
    caches are contiguous and of `kv_cache_shape`, or of `kv_rows_shape` (not in C++). `slot_mapping` is int32 or int64
    [T], distinct; a negative slot is skipped. The scales are those of `as_cached`.
    """
    keys, values = cache_rows(k_cache, v_cache, k.shape[-1])
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block_size = keys.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    stored_k, stored_v = as_cached(k[kept], k_cache.dtype, k_scale), as_cached(v[kept], v_cache.dtype, v_scale)
    if k_cache.dtype in FLOAT8:
        # Bytes can be indexed on every device.
        keys, values, stored_k, stored_v = (each.view(torch.uint8) for each in (keys, values, stored_k, stored_v))
    keys[blocks, :, offsets] = stored_k
    values[blocks, :, offsets] = stored_v


def as_cached(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as a cache of this dtype holds them: as they are, or in 8 bits the float that is nearest to
    x / scale: even at ties, and the greatest finite one for what is beyond that. NaN stays NaN."""
    if dtype not in FLOAT8:
        return x
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype)


def cache_rows(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of the caches as [num_blocks, num_kv_heads, block_size, head_dim], whatever their layout."""
    if k_cache.dim() == 4:
        return k_cache, v_cache
    return k_cache.unflatten(-1, (head_dim, -1)).transpose(2, 3), v_cache.unflatten(-1, (-1, head_dim))
