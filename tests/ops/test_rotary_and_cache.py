"""rotary_and_cache_ is its two operations one after the other."""

from __future__ import annotations

import pytest
import torch
from twins import DTYPES, run, twins

from vllm.ops.kv_cache import kv_cache_shape, reshape_and_cache_
from vllm.ops.rotary import rotary_embedding_
from vllm.ops.rotary_and_cache import rotary_and_cache_

NUM_BLOCKS = 8


@pytest.mark.parametrize("twin", twins("rotary_and_cache_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "rot_dim", "block_size"),
    [(0, (2, 1), 8, 8, 16), (1, (1, 1), 2, 2, 1), (7, (9, 3), 64, 64, 16), (9, (5, 5), 10, 6, 4)],
)
def test_rotates_and_writes(
    twin: str,
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
    run(twin, rotary_and_cache_, positions, q, k, v, table, *fused_caches, slots)
    q, k, v = apart.split([q_heads, kv_heads, kv_heads], dim=1)
    run(twin, rotary_embedding_, positions, q, k, table)
    run(twin, reshape_and_cache_, k, v, *apart_caches, slots)
    for one, other in zip([fused, *fused_caches], [apart, *apart_caches], strict=True):
        assert torch.equal(one, other)
