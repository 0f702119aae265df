"""Products of rows that are added to a residual and normalised first: the bits of the norm, then of the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import DTYPES, chosen, strided
from layouts import BFLOAT16_LAYOUTS, LEVELS, needs_kernels
from torch import Tensor

from vllm.ops.int8_linear import int8_linear, pack_int8_linear
from vllm.ops.packed_linear import pack_linear, packed_linear
from vllm.ops.rms_norm import AddedNorm, fused_add_rms_norm_

# Alone, a tile and more, panels shared out between threads, and rows shared out.
ROWS = [0, 1, 13, 15, 64, 130, 260]


def assert_normed_first(
    rows: int, inner: int, dtype: torch.dtype, pack: Callable[..., Any], multiply: Callable[..., Tensor]
) -> None:
    torch.manual_seed(rows)
    x, residual = (strided(torch.randn(max(ROWS), inner)).to(dtype)[:rows] for _ in range(2))
    wide_weight = torch.randn(inner)
    for gated, norm_weight in ((False, wide_weight), (False, wide_weight.to(dtype)), (True, wide_weight.to(dtype))):
        packed = pack(torch.randn(70, inner).to(dtype), torch.randn(70).to(dtype), gated=gated)
        apart, together = residual.clone(), strided(residual)
        expected = multiply(fused_add_rms_norm_(x, apart, norm_weight, 1e-5), packed)
        got = multiply(x, packed, norm=AddedNorm(together, norm_weight, 1e-5))
        assert torch.equal(got, expected)
        assert torch.equal(together, apart), "the sum is kept"
        assert rows == 0 or not torch.equal(together, residual)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inner", "pack", "multiply"),
    [(100, pack_linear, packed_linear), (200, pack_int8_linear, int8_linear)],
    ids=["plain", "int8"],
)
def test_what_the_machine_prefers(
    backend: str,
    rows: int,
    dtype: torch.dtype,
    inner: int,
    pack: Callable[..., Any],
    multiply: Callable[..., Tensor],
) -> None:
    with chosen(backend):
        assert_normed_first(rows, inner, dtype, pack, multiply)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("layout", BFLOAT16_LAYOUTS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_layout(backend: str, layout: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    with chosen(backend):
        assert_normed_first(rows, 40, torch.bfloat16, pack_linear, packed_linear)


@needs_kernels
def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.randn(3, 16), torch.randn(32, 16)
    good = AddedNorm(torch.randn(3, 16), torch.randn(16), 1e-5)
    with chosen("cpp"):
        for pack, multiply in ((pack_linear, packed_linear), (pack_int8_linear, int8_linear)):
            packed = pack(weight, None)
            for bad, name in (
                (good._replace(residual=torch.randn(2, 16)), "residual"),
                (good._replace(residual=torch.randn(16, 3).t()), "residual"),
                (good._replace(residual=good.residual.half()), "residual"),
                (good._replace(weight=torch.randn(15)), "norm_weight"),
                (good._replace(weight=good.weight.half()), "norm_weight"),
            ):
                with pytest.raises(RuntimeError, match=f"{name} must "):
                    multiply(x, packed, norm=bad)
