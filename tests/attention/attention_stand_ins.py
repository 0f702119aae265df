"""Stand-ins for libraries that need a GPU: what their documentation says of the functions that we call, in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from pretend_tensors import PretendTensor
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


class BatchPrefillWithPagedKVCacheWrapper:
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    plans = 0
    error: Exception | None = None
    """The next plans raise it."""
    bias = 0.0
    """Added to results."""

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"
        self._device = workspace.device

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        type(self).plans += 1
        if self.error is not None:
            raise self.error
        assert causal and sm_scale is not None and seq_lens is not None
        arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens
        for each in arrays:
            # The library asks for them on the host, and copies them to the device.
            assert each.device.type == "cpu" and each.dtype == torch.int32
            each.to(self._device, non_blocking=True)
        self._starts, indptr, indices, self._last, lengths = (each.tolist() for each in arrays)
        self._pages = [indices[first:end] for first, end in pairwise(indptr)]
        assert [self._num_tokens(row, page_size) for row in range(len(self._last))] == lengths
        assert all(page >= 0 for page in indices)
        self._shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._dtypes, self._scale = (q_data_type, kv_data_type), sm_scale
        self._limits = None if window_left < 0 else window_left + 1, logits_soft_cap

    def _num_tokens(self, row: int, page_size: int) -> int:
        return (len(self._pages[row]) - 1) * page_size + self._last[row]

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        keys, values = paged_kv_cache
        num_qo_heads, num_kv_heads, head_dim, page_size = self._shape
        assert q.shape[1:] == (num_qo_heads, head_dim) and len(q) == self._starts[-1]
        assert keys.shape[1:] == values.shape[1:] == (num_kv_heads, page_size, head_dim)
        assert (q.dtype, keys.dtype) == self._dtypes
        assert out.is_contiguous() and (out.shape, out.dtype) == (q.shape, q.dtype)
        if isinstance(q, PretendTensor):
            return PretendTensor.mode.launch(self._attend, (q, keys, values, out), {})
        return self._attend(q, keys, values, out)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        for row, pages in enumerate(self._pages):
            own = slice(self._starts[row], self._starts[row + 1])
            seq_len = self._num_tokens(row, keys.shape[1])
            result = attend_pages(q[own], keys, values, pages, seq_len, self._scale, *self._limits)
            out[own] = (result + self.bias).to(out.dtype)
        return out
