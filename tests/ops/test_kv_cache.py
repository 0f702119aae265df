"""reshape_and_cache_ is exact and writes its own slots only."""

from __future__ import annotations

import pytest
import torch
from twins import DTYPES, run, twins

from vllm.ops.kv_cache import cache_rows, kv_cache_shape, reshape_and_cache_

NUM_BLOCKS = 6


@pytest.mark.parametrize("twin", twins("reshape_and_cache_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "block_size"),
    [(0, 1, 8, 16), (1, 1, 1, 1), (7, 3, 64, 16), (9, 5, 10, 4)],
)
def test_writes_slots(
    twin: str,
    dtype: torch.dtype,
    slots_dtype: torch.dtype,
    tokens: int,
    heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, 4 * heads, head_dim).to(dtype)
    k, v = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    caches = [torch.full(kv_cache_shape(NUM_BLOCKS, block_size, heads, head_dim), 777.0, dtype=dtype) for _ in "kv"]
    slots = torch.randperm(NUM_BLOCKS * block_size)[:tokens].to(slots_dtype)
    slots[1::3] = -1
    run(twin, reshape_and_cache_, k, v, *caches, slots)
    keys, values = cache_rows(*caches, head_dim)
    expected_keys, expected_values = torch.full_like(keys, 777.0), torch.full_like(values, 777.0)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            expected_keys[block, :, offset] = k[token]
            expected_values[block, :, offset] = v[token]
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
