"""Causal attention of ragged queries over the paged key/value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import implementation
from vllm.ops.kv_cache import cache_views


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend. The queries of row r are the last tokens of its sequence, whose keys and values are all cached.

    Args:
        q: float32, bfloat16 or float16 [T, Hq, D]; may be a view whose last dimension is contiguous. Hq is a
            multiple of Hkv; query head h reads key head h // (Hq / Hkv).
        k_cache, v_cache: contiguous, of `kv_cache_shape`, of q's dtype.
        block_table: int32 [R, max_blocks]; the first ceil(seq_lens[r] / block_size) entries of row r are
            read.
        query_start_loc: int32 [R + 1]; row r owns the tokens query_start_loc[r] to query_start_loc[r + 1]
            of q.
        seq_lens: int32 [R], tokens of each sequence, this step's included.
        scale: factor on the scores.
        out: contiguous [T, Hq, D] of q's dtype to write into; allocated when None.

    Returns:
        [T, Hq, D], computed in float32. A row's values do not depend on the other rows of the batch.
    """
    if out is None:
        out = q.new_empty(q.shape)
    which = implementation(q)
    if which == "cpp":
        torch.ops.vllm_cpu.paged_attention(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out)
        return out
    if which == "triton":
        from vllm.ops.triton import paged_attention as kernels

        return kernels.paged_attention(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out)
    return _reference(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out)


def _reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    keys, values = cache_views(k_cache, v_cache, q.shape[-1])
    block_size = keys.shape[-1]
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        blocks = block_table[row, : -(-seq_len // block_size)]
        # [Hkv, tokens, D]
        row_keys = keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :seq_len].float()
        row_values = values[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].float()
        mask = None
        if end - start > 1:
            mask = torch.ones(end - start, seq_len, dtype=torch.bool, device=q.device)
            mask = mask.tril(seq_len - (end - start))
        attended = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1).float()[None],
            row_keys[None],
            row_values[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = attended[0].transpose(0, 1).to(out.dtype)
    return out
