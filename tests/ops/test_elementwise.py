"""x * factor and x + y: to the bit what PyTorch's float32 gives, rounded once."""

from __future__ import annotations

import pytest
import torch

from tests.ops.backends import DTYPES
from vllm.ops._dispatch import cpu_ops, force
from vllm.ops.elementwise import added, scaled

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="the C++ operators are not built")

SHAPES = [(0, 8), (1, 1), (3, 7), (2, 640), (5, 3, 17), (40, 1000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factor", [25.25, 0.1, -3.0])
def test_scaled(shape: tuple[int, ...], dtype: torch.dtype, factor: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with force("cpp"):
        got = scaled(x, factor)
    assert got.dtype == dtype and torch.equal(got, x * factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_added(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    with force("cpp"):
        got = added(x, y)
    assert got.dtype == dtype and torch.equal(got, x + y)


def test_operands_must_agree() -> None:
    x = torch.zeros(2, 6)
    with force("cpp"):
        with pytest.raises(RuntimeError, match="y must have the shape of x"):
            added(x, torch.zeros(3, 6))
        with pytest.raises(RuntimeError, match="y must have the dtype of x"):
            added(x, torch.zeros(2, 6, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="x must be contiguous"):
            scaled(x[:, :3], 2.0)
