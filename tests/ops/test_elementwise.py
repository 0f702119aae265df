"""x * factor and x + y: to the bit what PyTorch's float32 gives, rounded once. Gates: against float64."""

from __future__ import annotations

import pytest
import torch

from tests.ops.backends import DTYPES
from vllm.ops._dispatch import cpu_ops, force
from vllm.ops.elementwise import added, added_gated, gated, scaled, widened

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="the C++ operators are not built")

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (2, 640)], ids=str)
def test_added_gated(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    gate = 4 * torch.randn(shape[0], 1, generator=generator)
    truth = x.double() + torch.sigmoid(gate.double()) * y.double()
    for backend in ("cpp", "reference"):
        with force(backend):
            got = added_gated(x, y, gate)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), truth, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize(("gates", "width"), [(1, 1), (7, 1), (40, 1), (3, 5), (4, 32), (33, 17)])
def test_gated(gates: int, width: int, softplus: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, gates * width, generator=generator).to(dtype)
    gate = (5 * torch.randn(3, gates, generator=generator)).to(dtype)
    wide = gate.double()
    factor = torch.log1p(wide.exp()) if softplus else torch.sigmoid(wide)
    truth = x.double() * factor.repeat_interleave(width, 1)
    for backend in ("cpp", "reference"):
        with force(backend):
            got = gated(x, gate, softplus)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), truth, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widened(dtype: torch.dtype) -> None:
    x = torch.randn(5, 45, generator=torch.Generator().manual_seed(1)).to(dtype)[:, 3:40]
    with force("cpp"):
        got = widened(x)
    assert got.is_contiguous() and torch.equal(got, x.float())
