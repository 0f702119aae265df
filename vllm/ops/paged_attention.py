"""Attention of ragged queries over the paged key/value cache, causal or over whole sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import implementation, triton_function
from vllm.ops.kv_cache import cache_rows

# Larger heads do not fit a program's registers.
_MOST_TRITON_DIMS = 256


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    num_decodes: int | None = None,
    max_decode_len: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """Attend. The queries of row r are the last tokens of its sequence, whose keys and values are cached.

    The query at position i of head h sees the keys at positions j <= i, with a window those with i - window < j, with
    chunks those with j // chunk = i // chunk. Its scores are s = scale * q.k, with a soft-cap s = softcap *
    tanh(s / softcap), with ALiBi s + slope[h] * (j - i); the weights are their softmax, in whose denominator a sink is
    one more term, exp(sinks[h]).

    Args:
        q: float32, bfloat16 or float16 [T, Hq, D]; may be a view whose last dimension is contiguous. Hq is a
            multiple of Hkv; query head h reads key head h // (Hq / Hkv).
        k_cache, v_cache: of q's dtype or of one of `FLOAT8`, contiguous and of `kv_cache_shape`, or of `kv_rows_shape`
            (not in C++).
        block_table: int32 [R, max_blocks]; of row r's first ceil(seq_lens[r] / block_size) entries those are read
            whose blocks a query sees. On CUDA max_blocks * block_size bounds seq_lens.
        query_start_loc: int32 [R + 1]; row r owns the tokens query_start_loc[r] to query_start_loc[r + 1] of q.
        seq_lens: int32 [R], tokens of each sequence, this step's included.
        scale: factor on the scores, positive.
        out: contiguous [T, Hq, D] of q's dtype to write into; allocated when None.
        num_decodes: the first rows, which have one query each, where no other row has just one; None = unknown. On CUDA
            these rows and the others are then launched for themselves, or not at all where there are none.
        max_decode_len: the longest sequence of those rows, None = unknown; launches for longer ones are omitted.
        window: tokens that a query sees, itself included, at least 1; None = all before it.
        softcap: bound of the scores, positive; None = none.
        alibi_slopes, sinks: contiguous float32 [Hq]; None = none.
        k_scale, v_scale: positive; keys and values are those of caches of 8 bits times this. 1.0 for other caches.
        chunk: at least 1: tokens of the parts of a sequence that are attended to apart; None = one. Not with a window.

    Returns:
        [T, Hq, D], summed in float32. A row's values do not depend on the other rows of the batch. On CUDA nothing
        waits for the device, and the launches depend on shapes, num_decodes and max_decode_len alone.
    """
    if out is None:
        out = q.new_empty(q.shape)
    arguments = q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale, out
    which, options = implementation(q), (window, softcap, alibi_slopes, sinks, k_scale, v_scale, chunk)
    if which == "triton" and q.shape[-1] <= _MOST_TRITON_DIMS:
        return triton_function("paged_attention", __name__)(*arguments, num_decodes, max_decode_len, *options)
    if which == "cpp":
        plain = window or chunk or 0, softcap or 0.0, alibi_slopes, sinks
        torch.ops.vllm_cpu.paged_attention(*arguments, *plain, k_scale, v_scale, chunk is not None)
    else:
        paged_attention_reference(*arguments, *options)
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
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    chunk: int | None = None,
    is_causal: bool = True,
    whole_from: int | None = None,
) -> None:
    """As `paged_attention`, in PyTorch, which waits for the device. Without `is_causal`, a query sees also the tokens
    after it; with `whole_from`, all from that one of the request's on, also those before its window."""
    keys, values = cache_rows(k_cache, v_cache, q.shape[-1])
    block_size = keys.shape[2]
    starts = query_start_loc.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)
        seen_from = torch.zeros_like(positions)
        if window is not None:
            seen_from = (positions - window + 1).clamp(min=0)
        elif chunk is not None:
            seen_from = positions // chunk * chunk
        if whole_from is not None:
            seen_from = seen_from.clamp(max=whole_from)
        first = int(seen_from[0])
        skipped = first // block_size
        blocks = block_table[row, skipped : -(-seq_len // block_size)]
        # [Hkv, tokens, D], contiguous: the order of sums must not follow the cache's layout.
        seen = slice(first - skipped * block_size, seq_len - skipped * block_size)
        row_keys = keys[blocks].transpose(0, 1).flatten(1, 2)[:, seen].float().contiguous().mul_(k_scale)
        row_values = values[blocks].transpose(0, 1).flatten(1, 2)[:, seen].float().contiguous().mul_(v_scale)
        queries = q[start:end].transpose(0, 1).float()
        if is_causal and all(option is None for option in (softcap, sinks, alibi_slopes, window, chunk)):
            attended = _plain(queries, row_keys, row_values, scale)
        else:
            keys_at = torch.arange(first, seq_len, device=q.device)
            hidden = keys_at < seen_from[:, None]
            if is_causal:
                hidden |= keys_at > positions[:, None]
            scores = torch.einsum("hqd,hkd->hqk", queries, _of_queries(row_keys, queries)) * scale
            scores = _with_options(scores, keys_at - positions[:, None], hidden, softcap, alibi_slopes)
            weights = _softmax(scores, sinks)
            attended = torch.einsum("hqk,hkd->hqd", weights, _of_queries(row_values, queries))
        out[start:end] = attended.transpose(0, 1).to(out.dtype)


def _plain(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    count, tokens = queries.shape[1], keys.shape[1]
    mask = None
    if count > 1:
        mask = torch.ones(count, tokens, dtype=torch.bool, device=queries.device).tril(tokens - count)
    batch = queries[None], keys[None], values[None]
    return F.scaled_dot_product_attention(*batch, attn_mask=mask, scale=scale, enable_gqa=True)[0]


def _of_queries(heads: Tensor, queries: Tensor) -> Tensor:
    return heads.repeat_interleave(queries.shape[0] // heads.shape[0], dim=0)


def _with_options(
    scores: Tensor, distance: Tensor, hidden: Tensor, softcap: float | None, alibi_slopes: Tensor | None
) -> Tensor:
    """Scores [Hq, queries, tokens] with the options applied, -inf where a key is hidden from a query; `distance` is the
    key's position minus the query's."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes[:, None, None] * distance
    return scores.masked_fill(hidden, -torch.inf)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
