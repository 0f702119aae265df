"""The paged backend: our own operations, C++ on CPU, Triton on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.attention.backend import AttentionBackend, AttentionMetadata, KVCache
from vllm.ops.kv_cache import kv_cache_shape, kv_rows_shape
from vllm.ops.paged_attention import paged_attention


class PagedAttention(AttentionBackend):
    """Attention by `vllm.ops`; the cache's layout is the one that suits `device`."""

    name = "paged"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._shape = kv_cache_shape if torch.device(device).type == "cpu" else kv_rows_shape

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return self._shape(num_blocks, block_size, num_kv_heads, head_dim)

    def attend(self, q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, scale: float) -> Tensor:
        requests = attn.block_table, attn.query_start_loc, attn.seq_lens
        return paged_attention(q, *kv_cache, *requests, scale, max_query_len=attn.max_query_len)
