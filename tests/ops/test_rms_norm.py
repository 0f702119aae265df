"""rms_norm and fused_add_rms_norm_ against float64."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run, strided
from torch import Tensor

from vllm.ops.rms_norm import fused_add_rms_norm_, rms_norm

SHAPES = [(0, 8), (1, 1), (3, 7), (5, 64), (9, 576), (2, 1500), (1, 4096)]
EPS = 1e-5


def truth(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    x, weight = x.to(dtype), weight.to(dtype)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rows(num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes; one is zero, and one would overflow if float16 were squared."""
    x = torch.randn(num_rows, hidden) * 2.0 ** torch.arange(num_rows)[:, None]
    if num_rows > 2:
        x[1] = 0.0
        x[2] = torch.randn(hidden).clamp(-2, 2) * 2e4
    return x.to(dtype)


def check(backend: str, got: Tensor, x: Tensor, weight: Tensor) -> None:
    """Each row by its own scale."""
    assert got.dtype == x.dtype and got.is_contiguous()
    for got_row, row in zip(got, x, strict=True):
        plain = truth(row, weight, x.dtype)
        safe = row.abs().max() < 100 and row.abs().max() > 0
        assert_accurate(backend, got_row, truth(row, weight), plain if safe else None)


@pytest.mark.parametrize("backend", backends("rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), SHAPES)
def test_rms_norm(backend: str, dtype: torch.dtype, num_rows: int, hidden: int) -> None:
    torch.manual_seed(hidden)
    x, weight = strided(rows(num_rows, hidden, dtype)), torch.randn(hidden).to(dtype)
    check(backend, run(backend, rms_norm, x, weight, EPS), x, weight)


@pytest.mark.parametrize("backend", backends("rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_heads_in_a_qkv_row(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv, weight = torch.randn(5, (6 + 2 + 2) * 16).to(dtype), torch.randn(16).to(dtype)
    heads = qkv[:, 6 * 16 : 8 * 16].view(5, 2, 16)
    got = run(backend, rms_norm, heads, weight, EPS)
    assert got.shape == heads.shape
    check(backend, got.flatten(0, 1), heads.flatten(0, 1), weight)


@pytest.mark.parametrize("backend", backends("fused_add_rms_norm_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), SHAPES)
def test_fused_add_rms_norm(backend: str, dtype: torch.dtype, num_rows: int, hidden: int) -> None:
    torch.manual_seed(hidden)
    x, weight = strided(rows(num_rows, hidden, dtype), 5), torch.randn(hidden).to(dtype)
    residual = strided(torch.randn(num_rows, hidden).to(dtype))
    total, x_before = residual.double() + x.double(), x.clone()
    got = run(backend, fused_add_rms_norm_, x, residual, weight, EPS)
    assert_accurate(backend, residual, total, slack=0.0)
    assert torch.equal(x, x_before)
    # The norm is of the residual as it was rounded.
    check(backend, got, residual, weight)


@pytest.mark.parametrize("backend", backends("fused_add_rms_norm_"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_with_more_digits_than_x(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = strided(rows(5, 100, dtype)), 1 + torch.randn(100)
    check(backend, run(backend, rms_norm, x, weight, EPS), x, weight)
    residual = torch.randn(5, 100).to(dtype)
    got = run(backend, fused_add_rms_norm_, x, residual, weight, EPS)
    check(backend, got, residual, weight)


@pytest.mark.parametrize("backend", backends("rms_norm"))
def test_a_row_does_not_depend_on_its_batch(backend: str) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(7, 200), torch.randn(200)
    together = run(backend, rms_norm, x, weight, EPS)
    for row in range(7):
        assert torch.equal(run(backend, rms_norm, x[row : row + 1], weight, EPS)[0], together[row])
