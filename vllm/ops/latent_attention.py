"""Attention over a paged cache of latent rows, which all heads share: each token's values are the first part of what
its keys are (DeepSeek V2, arXiv:2405.04434, section 2.1).

A cache is [num_blocks, block_size, latent_dim + rope_dim] on every device: a token's latent, then its rotated key. A
slot is block * block_size + offset in the block. The cache has the dtype of queries, or one of 8-bit floats
(`vllm.ops.kv_cache.FLOAT8`): it holds `as_cached` of the row then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import dispatched, implementation, triton_function
from vllm.ops.kv_cache import FLOAT8, as_cached


@dispatched
def write_latent_(latent: Tensor, rope: Tensor, cache: Tensor, slot_mapping: Tensor, scale: float = 1.0) -> None:
    """Write tokens' latents [T, latent_dim] and rotated keys [T, rope_dim] into their slots.

    `latent` and `rope` have the cache's dtype, or that is one of `FLOAT8`, and may be views whose last dimension is
    contiguous. `cache` is contiguous. `slot_mapping` is int32 or int64 [T], distinct; a negative slot is skipped.
    `scale` is that of `as_cached`.
    """
    kept = slot_mapping >= 0
    rows = as_cached(torch.cat((latent, rope), dim=-1)[kept], cache.dtype, scale)
    if cache.dtype in FLOAT8:
        # Bytes can be indexed on every device.
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache.view(-1, cache.shape[-1])[slot_mapping[kept].long()] = rows


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    cache_scale: float = 1.0,
) -> Tensor:
    """Attend causally. The queries of row r are the last tokens of its sequence, whose rows are cached.

    The scores of head h are scale * (q_latent.c + q_rope.k) of each token's latent c and key k; the result is the sum
    of the latents, weighted by the softmax of the scores.

    Args:
        q_latent, q_rope: float32, bfloat16 or float16 [T, H, latent_dim] and [T, H, rope_dim]; may be views whose last
            dimension is contiguous.
        cache: contiguous [num_blocks, block_size, latent_dim + rope_dim], of the queries' dtype or of one of `FLOAT8`.
        block_table: int32 [R, max_blocks]; of row r's entries the first ceil(seq_lens[r] / block_size) are read. On
            CUDA max_blocks * block_size bounds seq_lens.
        query_start_loc: int32 [R + 1]; row r owns the tokens query_start_loc[r] to query_start_loc[r + 1].
        seq_lens: int32 [R], tokens of each sequence, this step's included.
        scale: factor on the scores, positive.
        cache_scale: positive; rows are those of caches of 8 bits times this. 1.0 for other caches.

    Returns:
        [T, H, latent_dim] of the queries' dtype, contiguous, summed in float32. A row's values do not depend on the
        other rows of the batch.
    """
    arguments = q_latent, q_rope, cache, block_table, query_start_loc, seq_lens, scale
    which = implementation(q_latent)
    if which == "triton" and triton_function("fits", __name__)(q_latent):
        return triton_function("latent_attention", __name__)(*arguments, cache_scale)
    out = q_latent.new_empty(q_latent.shape)
    attend = torch.ops.vllm_cpu.latent_attention if which == "cpp" else latent_attention_reference
    attend(*arguments, out, cache_scale)
    return out


def latent_attention_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
    cache_scale: float = 1.0,
) -> None:
    """As `latent_attention`, in PyTorch, which waits for the device."""
    latent_dim = q_latent.shape[-1]
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        blocks = block_table[row, : -(-seq_len // cache.shape[1])]
        keys = cache[blocks].flatten(0, 1)[:seq_len].float() * cache_scale
        queries = torch.cat((q_latent[start:end], q_rope[start:end]), dim=-1).float()
        scores = torch.einsum("qhd,kd->hqk", queries, keys) * scale
        position = torch.arange(seq_len, device=cache.device)
        hidden = position > position[seq_len - (end - start) :, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,kd->qhd", weights, keys[:, :latent_dim]).to(out.dtype)
