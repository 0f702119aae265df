"""A step of random requests, with which a library is tried before the first request."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backend import AttentionBackend, AttentionMetadata, HostStep, KVCache


def random_step(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> tuple[Tensor, KVCache, AttentionMetadata]:
    """Queries [T, Hq, D] that are a view, the backend's cache, and the step: a request that decodes, one that continues
    its prompt, and one that begins it. A request's blocks are in no order, and one block is unused."""
    generator = torch.Generator().manual_seed(0)
    counts, seq_lens = [1, 5, 2 * block_size + 40], [block_size + 3, 2 * block_size, 2 * block_size + 40]
    num_blocks = [-(-tokens // block_size) for tokens in seq_lens]
    order = torch.randperm(sum(num_blocks) + 1, generator=generator).to(torch.int32)
    table = torch.zeros(len(counts), max(num_blocks), dtype=torch.int32)
    for row, own in enumerate(order[:-1].split(num_blocks)):
        table[row, : len(own)] = own

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    shape = backend.kv_cache_shape(len(order), block_size, num_kv_heads, head_dim)
    cache = rows(*shape), rows(*shape)
    q = rows(sum(counts), num_heads + 1, head_dim)[:, 1:]
    starts = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    attn = AttentionMetadata(
        torch.empty(0),
        table.to(device),
        starts.to(device),
        lengths.to(device),
        max(counts),
        max(seq_lens),
        num_decodes=1,
        max_decode_len=seq_lens[0],
        host=HostStep(starts.numpy(), lengths.numpy(), np.arange(len(counts)), table.numpy()),
    )
    return q, cache, attn


def are_close(got: Tensor, expected: Tensor) -> bool:
    """Whether results of `random_step` are equal but for rounding: values are about 1, and weights and results are
    rounded to 8 bits or more."""
    return torch.allclose(got.float(), expected.float(), rtol=0.02, atol=0.02)
