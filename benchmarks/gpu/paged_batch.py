"""Sequences in a paged cache with blocks in random order, for any attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bounds import ModelShape
from torch import Tensor

from vllm.attention.backend import AttentionMetadata, HostStep
from vllm.attention.options import AttentionOptions, LayerKind

# Tokens a block of the cache, by backend; FlashAttention 2 reads none smaller than that.
BACKENDS = {"paged": 16, "varlen": 256, "flashinfer": 16}


@dataclass(frozen=True)
class PagedBatch:
    """Queries that are the last tokens of their sequences.

    Attributes:
        q: [T, Hq, D].
        lengths: (queries, tokens) of each sequence.
        slots: int64, the cache slot of each token of all sequences, those of a sequence together.
        metadata: of a step that runs the queries.
    """

    q: Tensor
    lengths: tuple[tuple[int, int], ...]
    slots: Tensor
    metadata: AttentionMetadata
    num_blocks: int
    block_size: int
    scale: float

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(scale=self.scale)


def make_batch(
    lengths: Sequence[tuple[int, int]],
    shape: ModelShape,
    dtype: torch.dtype,
    block_size: int,
    generator: torch.Generator,
) -> PagedBatch:
    """Random queries of these (queries, tokens)."""
    device = generator.device
    counts = [-(-tokens // block_size) for _, tokens in lengths]
    order = torch.randperm(sum(counts), device=device, generator=generator)
    blocks = torch.nn.utils.rnn.pad_sequence(list(order.split(counts)), batch_first=True)
    slots = [
        (blocks[row][:, None] * block_size + torch.arange(block_size, device=device)).flatten()[:tokens]
        for row, (_, tokens) in enumerate(lengths)
    ]
    queries = torch.tensor([count for count, _ in lengths])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).int()
    num_queries = int(starts[-1])
    q = torch.randn(num_queries, shape.num_attention_heads, shape.head_dim, device=device, generator=generator)
    metadata = AttentionMetadata(
        slot_mapping=torch.cat([own[tokens - count :] for own, (count, tokens) in zip(slots, lengths, strict=True)]),
        block_table=blocks.int(),
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32, device=device),
        max_query_len=int(queries.max()),
        max_seq_len=max(tokens for _, tokens in lengths),
        host=_on_host(starts, lengths, blocks),
        **_decodes(lengths),
    )
    return PagedBatch(
        q.to(dtype), tuple(lengths), torch.cat(slots), metadata, sum(counts), block_size, shape.head_dim**-0.5
    )


def _on_host(starts: Tensor, lengths: Sequence[tuple[int, int]], blocks: Tensor) -> HostStep:
    seq_lens = np.array([tokens for _, tokens in lengths], dtype=np.int32)
    return HostStep(starts.numpy(), seq_lens, np.arange(len(lengths)), blocks.int().cpu().numpy())


def _decodes(lengths: Sequence[tuple[int, int]]) -> dict[str, int]:
    """A step's metadata about sequences with one query, where these come first."""
    ones = [tokens for count, tokens in lengths if count == 1]
    come_first = all(count == 1 for count, _ in lengths[: len(ones)])
    return {"num_decodes": len(ones), "max_decode_len": max(ones, default=0)} if come_first else {}


def empty_caches(backend: Any, batch: PagedBatch, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Keys and values of NaN, so that reads of unwritten cells are detected."""
    size = backend.kv_cache_shape(batch.num_blocks, batch.block_size, shape.num_key_value_heads, shape.head_dim)
    keys, values = (torch.full(size, torch.nan, dtype=batch.q.dtype, device=batch.q.device) for _ in range(2))
    return keys, values


def find_backend(name: str, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Any:
    """The backend, verified to be the requested one.

    Raises:
        ValueError: it is not available; with the reason.
    """
    from vllm.attention.select import select_backend

    layer = LayerKind(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, AttentionOptions())
    return select_backend(name, device, dtype, shape.head_dim, BACKENDS[name], layers=[layer])


def dense_attention(batch: PagedBatch, keys: Tensor, values: Tensor) -> Tensor:
    """float64 [T, Hq, D] from the tokens' keys and values [sum of tokens, Hkv, D], sequence by sequence."""
    results, first, start = [], 0, 0
    for count, tokens in batch.lengths:
        mask = torch.ones(count, tokens, dtype=torch.bool, device=keys.device).tril(tokens - count)
        own = slice(start, start + tokens)
        attended = F.scaled_dot_product_attention(
            *(part.double().transpose(0, 1)[None] for part in (batch.q[first : first + count], keys[own], values[own])),
            attn_mask=mask,
            scale=batch.scale,
            enable_gqa=True,
        )
        results.append(attended[0].transpose(0, 1))
        first, start = first + count, start + tokens
    return torch.cat(results)
