"""silu_and_mul against float64."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run, strided

from vllm.ops.silu_and_mul import silu_and_mul


def truth(x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    gate, up = x.to(dtype).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("backend", backends("silu_and_mul"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 4), (1, 1), (3, 7), (2, 64), (2, 1536), (1, 1500)])
def test_silu_and_mul(backend: str, dtype: torch.dtype, num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    x = strided(torch.randn(num_rows, 2 * width).mul_(3).to(dtype))
    got = run(backend, silu_and_mul, x)
    assert got.dtype == dtype and got.is_contiguous()
    assert_accurate(backend, got, truth(x), truth(x, dtype))


@pytest.mark.parametrize("backend", backends("silu_and_mul"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_beyond_the_exponential(backend: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([-6e4, -200.0, -90.0, -86.0, -20.0, -0.0, 0.0, 1e-3, 20.0, 90.0, 200.0, 6e4])
    x = torch.cat([gate, torch.ones_like(gate)])[None].to(dtype)
    got = run(backend, silu_and_mul, x)
    for column in range(len(gate)):
        assert_accurate(backend, got[:, column], truth(x)[:, column])


@pytest.mark.parametrize("backend", backends("silu_and_mul"))
def test_gates_that_are_not_finite(backend: str) -> None:
    x = torch.tensor([[torch.nan, -torch.inf, torch.inf, 1.0, 1.0, 1.0]])
    got = run(backend, silu_and_mul, x)[0]
    assert got.isnan().tolist() == [True, True, False] and got[2] == torch.inf
