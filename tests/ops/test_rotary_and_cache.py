"""rotary_and_cache_ is its two operations one after the other."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, backends, run

from vllm.ops.kv_cache import cache_rows, kv_cache_shape, kv_rows_shape, reshape_and_cache_
from vllm.ops.rotary import rotary_and_cache_, rotary_embedding_

NUM_BLOCKS = 8


@pytest.mark.parametrize("backend", backends("rotary_and_cache_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rot_dim", "block_size"),
    [(0, (2, 1), 8, 8, 16), (1, (1, 1), 2, 2, 1), (7, (9, 3), 64, 64, 16), (9, (5, 5), 10, 6, 4)],
)
def test_rotates_and_writes(
    backend: str,
    dtype: torch.dtype,
    integers: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    rot_dim: int,
    block_size: int,
) -> None:
    torch.manual_seed(tokens)
    q_heads, kv_heads = heads
    qkv = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.rand(50, rot_dim // 2) * 100
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(0, 50, (tokens,), dtype=integers)
    slots = torch.randperm(NUM_BLOCKS * block_size)[:tokens].to(integers)
    slots[1::3] = -1
    shape = kv_cache_shape(NUM_BLOCKS, block_size, kv_heads, head_dim)

    fused, apart = qkv.clone(), qkv.clone()
    fused_caches, apart_caches = ([torch.full(shape, 777.0, dtype=dtype) for _ in "kv"] for _ in range(2))
    q, k, v = fused.split([q_heads, kv_heads, kv_heads], dim=1)
    run(backend, rotary_and_cache_, positions, q, k, v, table, *fused_caches, slots)
    q, k, v = apart.split([q_heads, kv_heads, kv_heads], dim=1)
    run(backend, rotary_embedding_, positions, q, k, table)
    run(backend, reshape_and_cache_, k, v, *apart_caches, slots)
    for one, other in zip([fused, *fused_caches], [apart, *apart_caches], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("token_major", [False, True])
def test_writes_into_every_layout(backend: str, token_major: bool) -> None:
    torch.manual_seed(0)
    tokens, kv_heads, head_dim, block_size = 5, 9, 10, 4
    q, k, v = torch.randn(3, tokens, kv_heads, head_dim)
    slots = torch.tensor([7, -1, 30, 0, 12])
    table = torch.randn(20, 6)
    positions = torch.arange(tokens)
    cells = [torch.full(kv_cache_shape(NUM_BLOCKS, block_size, kv_heads, head_dim), 777.0) for _ in "kv"]
    rows = [torch.full(kv_rows_shape(NUM_BLOCKS, block_size, kv_heads, head_dim), 777.0) for _ in "kv"]
    if token_major:
        rows = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in rows]
    for caches in (cells, rows):
        run(backend, rotary_and_cache_, positions, q.clone(), k.clone(), v, table, *caches, slots)
    for one, other in zip(cache_rows(cells[0], cells[1], head_dim), rows, strict=True):
        assert torch.equal(one, other)
    for caches in (cells, rows):
        run(backend, reshape_and_cache_, k, v, *caches, slots)
    for one, other in zip(cache_rows(cells[0], cells[1], head_dim), rows, strict=True):
        assert torch.equal(one, other)
