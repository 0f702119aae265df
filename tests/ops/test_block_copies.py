"""copy_blocks_ copies what it is told to, of parts of any size and distance, and nothing else; sums are a store's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import chosen

from vllm.ops._dispatch import cpu_ops
from vllm.ops.block_copies import block_parts, block_sums, copy_blocks_, take_blocks_
from vllm.utils.kv_store.segment import checksums

ON_CPU = ["reference"] if cpu_ops() is None else ["reference", "cpp"]


@pytest.mark.parametrize("backend", [*ON_CPU, "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (1, 3000, 7)], ids=str)
def test_blocks(backend: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    device = "cuda" if torch.cuda.is_available() and backend == "triton" else "cpu"
    torch.manual_seed(0)
    whole = torch.randint(0, 100, (6, sum(sizes)), device=device).to(dtype)
    apart = [torch.randint(0, 100, (9, size), device=device).to(dtype) for size in sizes]
    expected, kept = [part.clone() for part in apart], whole.clone()
    sources, targets = torch.tensor([5, 0, 3], device=device), torch.tensor([1, 8, 2], device=device)
    for part, own in zip(expected, whole.split(sizes, dim=1), strict=True):
        part[targets] = own[sources]
    with chosen(backend):
        copy_blocks_(sources, targets, block_parts(whole.split(sizes, dim=1)), block_parts(apart))
        copy_blocks_(sources[:0], targets[:0], block_parts(apart), block_parts(apart))
    for part, own in zip(apart, expected, strict=True):
        assert torch.equal(part, own)
    assert torch.equal(whole, kept)


def sums_of(rows: torch.Tensor) -> list[int]:
    return [checksums(row, 1)[0] for row in rows.numpy()]


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000, 8192])
def test_sums_are_those_of_a_store(backend: str, size: int) -> None:
    rows = torch.randint(0, 256, (3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    with chosen(backend):
        assert block_sums(rows).numpy().view(np.uint64).tolist() == sums_of(rows)
        assert block_sums(rows[:0]).tolist() == []


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("sizes", [(16, 16), (1, 3000, 7), (100_000,)], ids=str)
def test_blocks_are_taken_with_their_sums(backend: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    apart = [torch.randn((9, size)).bfloat16() for size in sizes]
    kept = [part.clone() for part in apart]
    rows = torch.full((3, 2 * sum(sizes)), 255, dtype=torch.uint8)
    with chosen(backend):
        sums = take_blocks_(rows, torch.tensor([7, 0, 7]), block_parts(apart))
    assert torch.equal(rows, torch.cat([part[[7, 0, 7]] for part in kept], dim=1).view(torch.uint8))
    assert sums.numpy().view(np.uint64).tolist() == sums_of(rows)
    assert all(map(torch.equal, apart, kept))


@pytest.mark.skipif(cpu_ops() is None, reason="the C++ kernels are not built")
def test_what_would_leave_the_memory_is_refused() -> None:
    parts, one = block_parts([torch.zeros(4, 8)]), torch.tensor([1])
    with pytest.raises(RuntimeError, match=r"source_ids must be in \[0, 4\), got 4"):
        copy_blocks_(torch.tensor([4]), one, parts, parts)
    with pytest.raises(RuntimeError, match="parts of the same sizes"):
        copy_blocks_(one, one, parts, block_parts([torch.zeros(4, 9)]))
    with pytest.raises(RuntimeError, match="target_ids must have size 1 in dimension 0, got 2"):
        copy_blocks_(one, torch.tensor([1, 2]), parts, parts)
