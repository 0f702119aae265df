"""reshape_and_cache_ is exact and writes its own slots only."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, backends, run
from torch import Tensor

from vllm.ops.kv_cache import cache_rows, kv_cache_shape, reshape_and_cache_

NUM_BLOCKS = 6


@pytest.mark.parametrize("backend", backends("reshape_and_cache_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "block_size"),
    [(0, 1, 8, 16), (1, 1, 1, 1), (7, 3, 64, 16), (9, 5, 10, 4)],
)
def test_writes_slots(
    backend: str,
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
    slots = torch.randperm(NUM_BLOCKS * block_size)[:tokens].to(slots_dtype)
    slots[1::3] = -1
    assert_writes(backend, k, v, block_size, slots)


@pytest.mark.parametrize("backend", backends("reshape_and_cache_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (10, 16), (16, 4), (8, 32)])
def test_writes_prompts(backend: str, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    """Slots that follow each other, from the middle of a block over its end, with a token left out."""
    torch.manual_seed(head_dim)
    first, second, third = torch.randperm(NUM_BLOCKS)[:3] * block_size
    slots = torch.cat([first + torch.arange(block_size // 2 - 1, block_size), second + torch.arange(block_size)])
    slots = torch.cat([slots, third + torch.arange(block_size - 2), torch.tensor([-1, -1])])
    slots[block_size] = -1
    heads = 3
    k, v = torch.randn(len(slots), 2 * heads, head_dim).to(dtype).split(heads, dim=1)
    assert_writes(backend, k, v, block_size, slots)


def assert_writes(backend: str, k: Tensor, v: Tensor, block_size: int, slots: Tensor) -> None:
    _, heads, head_dim = k.shape
    shape = kv_cache_shape(NUM_BLOCKS, block_size, heads, head_dim)
    caches = [torch.full(shape, 777.0, dtype=k.dtype) for _ in "kv"]
    run(backend, reshape_and_cache_, k, v, *caches, slots)
    keys, values = cache_rows(*caches, head_dim)
    expected_keys, expected_values = torch.full_like(keys, 777.0), torch.full_like(values, 777.0)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            expected_keys[block, :, offset] = k[token]
            expected_values[block, :, offset] = v[token]
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
