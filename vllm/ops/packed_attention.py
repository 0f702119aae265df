"""Attention of tokens to all others of their text, before and after them, for texts side by side without a cache."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import implementation

# Queries attended at once where distances matter: that bounds the memory of masks, and skips keys out of reach.
_QUERIES = 256


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor:
    """Attend within each text.

    The query at position i of head h sees the keys of its text at all positions j, with a window those from
    i - window[0] to i + window[1]. Its scores are s = scale * q.k, with a soft-cap s = softcap * tanh(s / softcap),
    with ALiBi s - slope[h] * |j - i|; the weights are their softmax.

    Args:
        q: float32, bfloat16 or float16 [T, Hq, D]. Hq is a multiple of Hkv; query head h reads key head
            h // (Hq / Hkv).
        k, v: [T, Hkv, D] of q's dtype; these and q may be views whose last dimension is contiguous.
        cu_seqlens: int32 [B + 1] on the CPU, ascending from 0 to T: text b owns the tokens cu_seqlens[b] to
            cu_seqlens[b + 1].
        scale: factor on the scores, positive.
        window: tokens that a query sees before and after itself, each at least 0; None = all.
        softcap: bound of the scores, positive; None = none.
        alibi_slopes: contiguous float32 [Hq]; None = none.
        seqused_k: int32 [B] on the CPU: of each text's keys the first so many are seen. A query that sees none has
            zeros. None = all.

    Returns:
        [T, Hq, D], contiguous. In C++ it is summed in float32, and a text's values do not depend on the others to the
        bit; elsewhere PyTorch's attention runs texts of equal lengths that stand side by side at once.
    """
    if implementation(q) == "cpp":
        left, right = (-1, -1) if window is None else window
        options = left, right, softcap or 0.0, alibi_slopes, seqused_k
        return torch.ops.vllm_cpu.packed_attention(q, k, v, cu_seqlens, scale, *options)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    lengths = cu_seqlens.diff().tolist()
    keys_seen = lengths if seqused_k is None else seqused_k.tolist()
    for (length, seen), same in groupby(zip(lengths, keys_seen, strict=True)):
        count = len(list(same))
        if not length:
            continue
        rows = slice(start, start + count * length)
        queries, keys, values = (each[rows].unflatten(0, (count, length)).transpose(1, 2) for each in (q, k, v))
        texts = queries, keys[:, :, :seen], values[:, :, :seen]
        out[rows] = _attend(*texts, scale, window, softcap, alibi_slopes).transpose(1, 2).flatten(0, 1)
        start = rows.stop
    return out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """[N, Hq, L, D] and of the keys that are seen [N, Hkv, S, D] -> [N, Hq, L, D]."""
    length = q.shape[2]
    left, right = (length, length) if window is None else window
    is_whole = min(left, right) >= length - 1
    if is_whole and alibi_slopes is None and k.shape[2]:
        return _attend_block(q, k, v, scale, None, None, softcap, None)
    places = torch.arange(length, device=q.device)
    parts = []
    for start in range(0, length, _QUERIES):
        stop = min(start + _QUERIES, length)
        keys = slice(max(start - left, 0), min(stop + right, k.shape[2]))
        if keys.start >= keys.stop:
            parts.append(torch.zeros_like(q[:, :, start:stop]))
            continue
        distances = places[keys] - places[start:stop, None]
        mask = None if is_whole else (distances >= -left) & (distances <= right)
        block = q[:, :, start:stop], k[:, :, keys], v[:, :, keys]
        parts.append(_attend_block(*block, scale, distances, mask, softcap, alibi_slopes))
    return torch.cat(parts, 2)


def _attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    distances: Tensor | None,
    mask: Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """`distances`: keys' positions minus queries', [Lq, Lk], for `alibi_slopes`; `mask`: which keys a query sees."""
    if softcap is None and alibi_slopes is None:
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q.float() @ k.float().transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None and distances is not None:
        scores -= alibi_slopes[:, None, None] * distances.abs()
    if mask is None:
        return scores.softmax(-1).to(v.dtype) @ v
    # Zeros for a query that sees no key.
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    return weights.to(v.dtype) @ v
