"""The paged backend: writes this step's keys and values, then attends over each request's blocks."""

from __future__ import annotations

from torch import Tensor

from vllm.ops.kv_cache import reshape_and_cache_
from vllm.ops.paged_attention import paged_attention
from vllm.ops.rotary_and_cache import rotary_and_cache_
from vllm.v1.attention.metadata import AttentionMetadata


def write_kv(k: Tensor, v: Tensor, kv_cache: tuple[Tensor, Tensor], attn: AttentionMetadata) -> None:
    """Put k, v [T, Hkv, D] into the cache's slots."""
    reshape_and_cache_(k, v, kv_cache[0], kv_cache[1], attn.slot_mapping)


def rotate_and_write_kv(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    attn: AttentionMetadata,
) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by positions [T], then put k, v into the cache's slots."""
    rotary_and_cache_(positions, q, k, v, cos_sin_cache, kv_cache[0], kv_cache[1], attn.slot_mapping)


def attend(q: Tensor, kv_cache: tuple[Tensor, Tensor], attn: AttentionMetadata, scale: float) -> Tensor:
    """Causal attention of q [T, Hq, D] over keys and values already in the cache; returns [T, Hq, D]."""
    return paged_attention(q, kv_cache[0], kv_cache[1], attn.block_table, attn.query_start_loc, attn.seq_lens, scale)
