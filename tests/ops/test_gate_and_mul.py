"""gate_and_mul against float64."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run, strided

from vllm.ops.gate_and_mul import ACTIVATIONS, gate_and_mul


def truth(x: torch.Tensor, activation: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    gate, up = x.to(dtype).chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


@pytest.mark.parametrize("backend", backends("gate_and_mul"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 4), (1, 1), (3, 7), (2, 64), (2, 1536), (1, 1500)])
def test_gate_and_mul(backend: str, activation: str, dtype: torch.dtype, num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    x = strided(torch.randn(num_rows, 2 * width).mul_(3).to(dtype))
    got = run(backend, gate_and_mul, x, activation)
    assert got.dtype == dtype and got.is_contiguous()
    assert_accurate(backend, got, truth(x, activation), truth(x, activation, dtype))


@pytest.mark.parametrize("backend", backends("gate_and_mul"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_beyond_the_exponential(backend: str, activation: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([-6e4, -200.0, -90.0, -86.0, -20.0, -12.5, -5.0, -0.0, 0.0, 1e-3, 5.0, 12.5, 20.0, 90.0, 6e4])
    x = torch.cat([gate, torch.ones_like(gate)])[None].to(dtype)
    got, wanted = run(backend, gate_and_mul, x, activation), truth(x, activation)
    if activation != "silu":
        # Where 1 + erf or 1 + tanh cancels in float32: what is left is nothing beside a gate's size.
        lost = gate < -4
        assert (got[0, lost].double() - wanted[0, lost]).abs().le(2e-7 * gate[lost].abs()).all()
        got, wanted = got[:, ~lost], wanted[:, ~lost]
    for column in range(got.shape[1]):
        assert_accurate(backend, got[:, column], wanted[:, column])


@pytest.mark.parametrize("backend", backends("gate_and_mul"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_that_are_not_finite(backend: str, activation: str) -> None:
    x = torch.tensor([[torch.nan, -torch.inf, torch.inf, 1.0, 1.0, 1.0]])
    got = run(backend, gate_and_mul, x, activation)[0]
    assert got[0].isnan()
    # The limits of GELU are 0 and infinity; where infinity meets 0 on the way, it is NaN.
    assert got[1].isnan() or (activation != "silu" and got[1].abs() < 1e-30)
    assert got[2] == torch.inf or (activation != "silu" and got[2].isnan())
