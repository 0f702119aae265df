"""The paged backend: our own operations, C++ on CPU, Triton on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.attention.backend import AttentionBackend, KVCache
from vllm.attention.metadata import AttentionMetadata
from vllm.ops.kv_cache import kv_cache_shape, kv_rows_shape
from vllm.ops.paged_attention import paged_attention


class PagedAttention(AttentionBackend):
    """
    Args:
        device: its kind decides the layout of the cache; attention takes either.
    """

    name = "paged"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._shape = kv_cache_shape if torch.device(device).type == "cpu" else kv_rows_shape

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return self._shape(num_blocks, block_size, num_kv_heads, head_dim)

    def attend(self, q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, scale: float) -> Tensor:
        return paged_attention(
            q,
            kv_cache[0],
            kv_cache[1],
            attn.block_table,
            attn.query_start_loc,
            attn.seq_lens,
            scale,
            max_query_len=attn.max_query_len,
        )
