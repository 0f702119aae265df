"""Stand-ins for libraries that need a GPU: what their documentation says of the functions that we call, in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: list[int],
    seq_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of one request's last tokens, q [n, Hq, D], over pages [N, page size, Hkv, D]."""
    group = q.shape[1] // keys.shape[2]
    keys, values = (
        each[pages].flatten(0, 1)[:seq_len].double().repeat_interleave(group, dim=1) for each in (keys, values)
    )
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(seq_len) - (seq_len - len(q) + torch.arange(len(q)))[:, None]
    scores.masked_fill_((distance > 0) | (distance <= -(window or seq_len)), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn for causal attention over pages."""
    left, right = window_size
    assert right == 0 and scale is not None and cu_seq_k is None
    assert block_table is not None and seqused_k is not None
    assert block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    assert enable_gqa or query.shape[1] == key.shape[2]
    starts = cu_seq_q.tolist()
    assert max_q >= max(end - start for start, end in pairwise(starts))
    assert max_k >= int(seqused_k.max())
    page_size = key.shape[1]
    out = torch.full_like(query, torch.nan)
    for row, seq_len in enumerate(seqused_k.tolist()):
        own = slice(starts[row], starts[row + 1])
        pages = block_table[row, : -(-seq_len // page_size)].tolist()
        window = None if left < 0 else left + 1
        out[own] = attend_pages(query[own], key, value, pages, seq_len, scale, window).to(out.dtype)
    return out


class _Wrapper:
    """What FlashInfer's two wrappers for paged caches have in common."""

    plans = 0

    def __init__(self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool = False) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"

    def _plan(
        self,
        qo_indptr: Tensor,
        pages: tuple[Any, ...],
        sm_scale: float,
        dtypes: tuple[Any, Any],
        window_left: int = -1,
        logits_soft_cap: float | None = None,
    ) -> None:
        self._limits = None if window_left < 0 else window_left + 1, logits_soft_cap
        type(self).plans += 1
        indptr, indices, last_page_len, *self._shape = pages
        assert all(each.dtype == torch.int32 for each in (qo_indptr, indptr, indices, last_page_len))
        self._starts, self._scale, self._dtypes = qo_indptr.tolist(), sm_scale, dtypes
        self._pages = [indices[first:end].tolist() for first, end in pairwise(indptr)]
        self._last = last_page_len.tolist()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        num_qo_heads, num_kv_heads, head_dim, page_size = self._shape
        assert q.is_contiguous() and q.shape[1:] == (num_qo_heads, head_dim)
        assert keys.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert (q.dtype, keys.dtype) == self._dtypes
        out = torch.full_like(q, torch.nan)
        for row, pages in enumerate(self._pages):
            own = slice(self._starts[row], self._starts[row + 1])
            seq_len = (len(pages) - 1) * page_size + self._last[row]
            out[own] = attend_pages(q[own], keys, values, pages, seq_len, self._scale, *self._limits).to(out.dtype)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    def plan(self, qo_indptr, *pages, causal=False, sm_scale, q_data_type, kv_data_type, **limits):
        assert causal
        self._plan(qo_indptr, pages, sm_scale, (q_data_type, kv_data_type), **limits)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper."""

    def plan(self, *pages, sm_scale, q_data_type, kv_data_type, **limits):
        qo_indptr = torch.arange(len(pages[0]), dtype=torch.int32)
        self._plan(qo_indptr, pages, sm_scale, (q_data_type, kv_data_type), **limits)
