"""packed_linear: our panels, oneDNN's layout and the plain product, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from twins import DTYPES, assert_accurate, chosen, strided

from vllm.ops._dispatch import ISA_LEVELS, cpu_ops
from vllm.ops.packed_linear import PackedLinear, pack_linear, packed_linear

OPERATORS = cpu_ops()
LEVELS = ["reference"]
if OPERATORS is not None:
    LEVELS += ["cpp", *(f"cpp-{level}" for level in ISA_LEVELS[: OPERATORS.set_isa(-1)])]

# Below, at and above the panel's 32 columns, a chain's 256 products and every tile height.
SHAPES = [(1, 1), (31, 7), (32, 16), (33, 256), (70, 257), (130, 600), (3, 1500)]
ROWS = [0, 1, 2, 4, 7, 14, 15, 130]


def panels(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Our own layout, whatever the machine prefers."""
    return PackedLinear(torch.ops.vllm_cpu.pack_linear(weight), bias, "panels", tuple(weight.shape))


def packed(twin: str, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return pack_linear(weight, bias) if twin == "reference" else panels(weight, bias)


@pytest.mark.parametrize("twin", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_products(twin: str, dtype: torch.dtype, columns: int, inner: int) -> None:
    torch.manual_seed(columns)
    weight, bias = strided(torch.randn(columns, inner)).to(dtype), torch.randn(columns).to(dtype)
    x = strided(torch.randn(max(ROWS), inner)).to(dtype)
    for own_bias in (None, bias):
        with chosen(twin):
            ready = packed(twin, weight, own_bias)
            for rows in ROWS:
                got = packed_linear(x[:rows], ready)
                assert got.dtype == dtype and got.is_contiguous()
                truth = F.linear(x[:rows].double(), weight.double(), None if own_bias is None else bias.double())
                assert_accurate(twin, got, truth, slack=4e-6)


@pytest.mark.parametrize("twin", [level for level in LEVELS if level != "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unrounded_sums(twin: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(70, 300).to(dtype), torch.randn(9, 300).to(dtype)
    with chosen(twin):
        got = packed_linear(x, panels(weight, None), float_out=True)
        rounded = packed_linear(x, panels(weight, None))
    assert got.dtype == torch.float32
    assert_accurate(twin, got, F.linear(x.double(), weight.double()), slack=4e-6)
    assert torch.equal(got.to(dtype), rounded)


@pytest.mark.parametrize("twin", [level for level in LEVELS if level != "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(twin: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(96, 520).to(dtype), torch.randn(300, 520).to(dtype)
    with chosen(twin):
        ready = panels(weight, None)
        together = packed_linear(x, ready)
        for rows in (1, 2, 5, 14, 64):
            for first in (0, 17, 236):
                assert torch.equal(packed_linear(x[first : first + rows], ready), together[first : first + rows])


@pytest.mark.parametrize("twin", [level for level in LEVELS if level != "reference"])
def test_infinities_and_nan_stay_in_their_place(twin: str) -> None:
    weight, x = torch.ones(40, 20), torch.ones(30, 20)
    x[3, 7], x[5, 0] = torch.inf, torch.nan
    weight[33, 2] = -torch.inf
    with chosen(twin):
        got = packed_linear(x, panels(weight, None))
    assert torch.equal(got.isnan(), F.linear(x, weight).isnan())
    assert torch.equal(got.isinf(), F.linear(x, weight).isinf())


def test_onednn_layout_multiplies_the_same() -> None:
    if not torch.backends.mkldnn.is_available():
        return
    torch.manual_seed(2)
    weight, bias, x = (torch.randn(*shape).bfloat16() for shape in ((64, 48), (64,), (5, 48)))
    ready = PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias, "onednn", (64, 48))
    truth = F.linear(x.double(), weight.double(), bias.double())
    for rows in (0, 1, 5):
        assert_accurate("reference", packed_linear(x[:rows], ready), truth[:rows], slack=1e-2)


def test_the_width_of_x_is_checked() -> None:
    ready = pack_linear(torch.randn(3, 4), None)
    with pytest.raises(ValueError, match=r"x must be \[T, 4\] for a weight of \(3, 4\), got \(2, 5\)"):
        packed_linear(torch.randn(2, 5), ready)
