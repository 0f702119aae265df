"""layer_norm and fused_add_layer_norm_ against float64."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run, strided
from torch import Tensor

from vllm.ops.layer_norm import fused_add_layer_norm_, layer_norm

SHAPES = [(0, 8), (1, 1), (3, 7), (5, 64), (9, 384), (2, 1500), (1, 4096)]
EPS = 1e-5


def truth(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype = torch.float64, eps: float = EPS
) -> Tensor:
    x = x.to(dtype)
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight.to(dtype)
    return normed if bias is None else normed + bias.to(dtype)


def rows(num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes; one is constant, one is far from 0, and one would overflow if float16 were
    squared."""
    x = torch.randn(num_rows, hidden) * 2.0 ** torch.arange(num_rows)[:, None]
    if num_rows > 3:
        x[0] += 100
        x[1] = 3.0
        x[2] = torch.randn(hidden).clamp(-2, 2) * 2e4
    return x.to(dtype)


def check(backend: str, got: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Each row by its own scale."""
    assert got.dtype == x.dtype and got.is_contiguous()
    for got_row, row in zip(got, x, strict=True):
        expected = truth(row, weight, bias)
        # A mean in float32 is off by some of its last bits, which the norm magnifies.
        size = row.double().std(correction=0).item() if row.numel() > 1 else 0.0
        lost = 1e-7 * row.abs().max().item() / max(size, EPS**0.5)
        assert_accurate(backend, got_row, expected, slack=4e-6 + 4 * lost)


@pytest.mark.parametrize("backend", backends("layer_norm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", ["both", "weight", "wide", "none"])
@pytest.mark.parametrize(("num_rows", "hidden"), SHAPES)
def test_layer_norm(backend: str, dtype: torch.dtype, given: str, num_rows: int, hidden: int) -> None:
    torch.manual_seed(hidden)
    x = strided(rows(num_rows, hidden, dtype))
    own = torch.float32 if given == "wide" else dtype
    weight = None if given == "none" else torch.randn(hidden).to(own)
    bias = torch.randn(hidden).to(own) if given in ("both", "wide") else None
    check(backend, run(backend, layer_norm, x, weight, bias, EPS), x, weight, bias)


@pytest.mark.parametrize("backend", backends("layer_norm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_weight_for_each_head(backend: str, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    qkv, weight = torch.randn(5, (6 + 2 + 2) * 20).to(dtype), torch.randn(2, 20).to(dtype)
    bias = torch.randn(2, 20).to(dtype) if has_bias else None
    heads = qkv[:, 6 * 20 : 8 * 20].view(5, 2, 20)
    got = run(backend, layer_norm, heads, weight, bias, EPS)
    for head in range(2):
        check(backend, got[:, head].contiguous(), heads[:, head], weight[head], None if bias is None else bias[head])
    shared = run(backend, layer_norm, heads, weight[0], None, EPS)
    assert torch.equal(shared[:, 0], run(backend, layer_norm, heads[:, 0], weight[0], None, EPS))


@pytest.mark.parametrize("backend", backends("fused_add_layer_norm_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), SHAPES)
def test_fused_add_layer_norm(backend: str, dtype: torch.dtype, num_rows: int, hidden: int) -> None:
    torch.manual_seed(hidden)
    x, weight = strided(rows(num_rows, hidden, dtype), 5), torch.randn(hidden).to(dtype)
    bias, residual = torch.randn(hidden).to(dtype), strided(torch.randn(num_rows, hidden).to(dtype))
    total, x_before = residual.double() + x.double(), x.clone()
    got = run(backend, fused_add_layer_norm_, x, residual, weight, bias, EPS)
    assert_accurate(backend, residual, total, slack=0.0)
    assert torch.equal(x, x_before)
    # The norm is of the residual as it was rounded.
    check(backend, got, residual, weight, bias)


@pytest.mark.parametrize("backend", backends("layer_norm"))
def test_a_row_does_not_depend_on_its_batch(backend: str) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(7, 200), torch.randn(200), torch.randn(200)
    together = run(backend, layer_norm, x, weight, bias, EPS)
    for row in range(7):
        assert torch.equal(run(backend, layer_norm, x[row : row + 1], weight, bias, EPS)[0], together[row])
