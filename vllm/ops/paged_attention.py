"""Causal attention of ragged queries over the paged key/value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function
from vllm.ops.kv_cache import cache_rows


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """Attend. The queries of row r are the last tokens of its sequence, whose keys and values are all cached.

    Args:
        q: float32, bfloat16 or float16 [T, Hq, D]; may be a view whose last dimension is contiguous. Hq is a
            multiple of Hkv; query head h reads key head h // (Hq / Hkv).
        k_cache, v_cache: of q's dtype, contiguous and of `kv_cache_shape`, or of `kv_rows_shape` (not in C++).
        block_table: int32 [R, max_blocks]; the first ceil(seq_lens[r] / block_size) entries of row r are read. On
            CUDA max_blocks * block_size bounds seq_lens.
        query_start_loc: int32 [R + 1]; row r owns the tokens query_start_loc[r] to query_start_loc[r + 1] of q.
        seq_lens: int32 [R], tokens of each sequence, this step's included.
        scale: factor on the scores, positive.
        out: contiguous [T, Hq, D] of q's dtype to write into; allocated when None.
        max_query_len: the most queries of a row, None = unknown; with 1, CUDA omits the prefill's launch.

    Returns:
        [T, Hq, D], summed in float32. A row's values do not depend on the other rows of the batch. On CUDA nothing
        waits for the device, and the launches depend on shapes and max_query_len alone.
    """
    if out is None:
        out = q.new_empty(q.shape)
    arguments = q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out
    which = implementation(q)
    if which == "triton":
        return triton_function("paged_attention", __name__)(*arguments, max_query_len)
    if which == "cpp":
        torch.ops.vllm_cpu.paged_attention(*arguments)
    else:
        paged_attention_reference(*arguments)
    return out


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """As `paged_attention`, in PyTorch, which waits for the device."""
    keys, values = cache_rows(k_cache, v_cache, q.shape[-1])
    block_size = keys.shape[2]
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        blocks = block_table[row, : -(-seq_len // block_size)]
        # [Hkv, tokens, D], contiguous: the order of sums must not follow the cache's layout.
        row_keys = keys[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].float().contiguous()
        row_values = values[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].float().contiguous()
        mask = None
        if end - start > 1:
            mask = torch.ones(end - start, seq_len, dtype=torch.bool, device=q.device)
            mask = mask.tril(seq_len - (end - start))
        batch = q[start:end].transpose(0, 1).float()[None], row_keys[None], row_values[None]
        attended = F.scaled_dot_product_attention(*batch, attn_mask=mask, scale=scale, enable_gqa=True)
        out[start:end] = attended[0].transpose(0, 1).to(out.dtype)
