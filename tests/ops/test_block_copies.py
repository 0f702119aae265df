"""copy_blocks_ copies what it is told to, of parts of any size and distance, and nothing else."""

from __future__ import annotations

import pytest
import torch
from backends import chosen

from vllm.ops.block_copies import block_parts, copy_blocks_


@pytest.mark.parametrize("backend", ["reference", "triton"])
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
