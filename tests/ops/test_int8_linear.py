"""int8_linear: every twin against the products of integers that the definition gives, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from twins import DTYPES, assert_accurate, chosen, strided

from vllm.ops._dispatch import ISA_LEVELS, cpu_ops
from vllm.ops.int8_linear import MAX_INNER, int8_linear, pack_int8_linear, take_int8_rows

OPERATORS = cpu_ops()
CPP = [] if OPERATORS is None else ["cpp", *(f"cpp-{level}" for level in ISA_LEVELS[: OPERATORS.set_isa(-1)])]
TWINS = ["reference", *CPP]

# Below, at and above a panel's 32 columns, a run's 16 and a chain's 256 products.
SHAPES = [(1, 1), (31, 7), (32, 16), (33, 256), (70, 257), (130, 600)]
# Around every tile height, and enough for blocks of rows.
ROWS = [0, 1, 2, 3, 4, 7, 8, 15, 130]
# Sums are exact or rounded once more in float32; then three more roundings.
SLACK = 2e-6


def truth_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float64; scales and integers by the definition's float32 arithmetic, which decides how ties fall."""
    greatest, s = x.float().abs().amax(1, keepdim=True), weight.float().abs().amax(1) / 127
    limit = torch.full_like(greatest, 32639)
    a, q = (x.float() * (limit / greatest)).round(), (weight.float() / s[:, None]).round()
    product = (a.double() @ q.double().T) * (greatest / limit).double() * s.double()
    return product if bias is None else product + bias.double()


def rows_with_outliers(rows: int, inner: int) -> Tensor:
    """Like activations: rows of different sizes, some with one huge value."""
    x = torch.randn(rows, inner) * torch.logspace(-3, 3, rows)[:, None]
    x[::3, inner // 2] *= 300
    return x


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_products(twin: str, dtype: torch.dtype, columns: int, inner: int) -> None:
    torch.manual_seed(columns)
    weight, bias = strided(torch.randn(columns, inner)).to(dtype), torch.randn(columns).to(dtype)
    # float16 ends at 65504.
    x = strided(rows_with_outliers(max(ROWS), inner).clamp(-60000, 60000)).to(dtype)
    for own_bias in (None, bias):
        with chosen(twin):
            ready = pack_int8_linear(weight, own_bias)
            for rows in ROWS:
                got, unrounded = int8_linear(x[:rows], ready), int8_linear(x[:rows], ready, float_out=True)
                assert (got.dtype, unrounded.dtype) == (dtype, torch.float32)
                assert got.is_contiguous() and torch.equal(got, unrounded.to(dtype))
                assert_accurate(twin, unrounded, truth_of(x[:rows], weight, own_bias), slack=SLACK)


@pytest.mark.parametrize("twin", TWINS)
def test_near_the_unquantised_product(twin: str) -> None:
    """No output is further off than half a step of each factor allows."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, 300), rows_with_outliers(20, 300)
    with chosen(twin):
        got = int8_linear(x, pack_int8_linear(weight, None)).double()
    half_x = x.abs().amax(1, keepdim=True).double() / 32639 / 2
    half_w = weight.abs().amax(1, keepdim=True).double() / 127 / 2
    allowed = x.double().abs().sum(1, keepdim=True) * half_w.T + half_x * weight.double().abs().sum(1) * 1.01
    assert ((got - x.double() @ weight.double().T).abs() <= 1.0001 * allowed).all()


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("inner", [1500, MAX_INNER])
@pytest.mark.parametrize("value", [32639, -32639, 32512, 32384])
def test_the_greatest_sums_do_not_overflow(twin: str, inner: int, value: int) -> None:
    """Digits of (127, 127), (-127, -127), (127, 0) and (127, -128) at every place, times 127 and -127."""
    weight = torch.full((2, inner), 127.0)
    weight[1] = -127
    x = torch.full((2, inner), float(value))
    x[:, 0] = 32639  # sets the scale, so that the integers are the values
    with chosen(twin):
        got = int8_linear(x, pack_int8_linear(weight, None))
    # Sums of floats round: half a unit a product of a chain of 256, and one a chain.
    torch.testing.assert_close(
        got.double(), x.double() @ weight.double().T, rtol=2e-5 if "cpp" in twin else 1e-7, atol=0
    )


@pytest.mark.parametrize("twin", CPP)
def test_integers_are_multiplied_exactly(twin: str) -> None:
    torch.manual_seed(3)
    weight = torch.randint(-127, 128, (50, 100)).float()
    x = torch.randint(-1000, 1001, (9, 100)).float()
    weight[:, 0], x[:, 1] = 127, 32639
    with chosen(twin):
        got = int8_linear(x, pack_int8_linear(weight, None))
    assert torch.equal(got.double(), (x.double() @ weight.double().T))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(twin: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(200, 520).to(dtype), rows_with_outliers(300, 520).clamp(-6e4, 6e4).to(dtype)
    with chosen(twin):
        ready = pack_int8_linear(weight, None)
        together = int8_linear(x, ready, float_out=True)
        for rows in (1, 2, 3, 5, 7, 14, 64):
            for first in (0, 17, 236):
                assert torch.equal(
                    int8_linear(x[first : first + rows], ready, float_out=True), together[first : first + rows]
                )


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_zero_tiny_or_not_finite(twin: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    weight, bias = torch.randn(40, 50).to(dtype), torch.randn(40).to(dtype)
    x = torch.randn(6, 50).to(dtype)
    x[0] = 0
    x[1] *= 1e-38
    x[2, 3], x[3, 7], x[4, 49] = torch.nan, torch.inf, -torch.inf
    weight[5] = 0
    with chosen(twin):
        got = int8_linear(x, pack_int8_linear(weight, bias))
        alone = int8_linear(x[5:], pack_int8_linear(weight, bias))
    assert torch.equal(got[:2], bias.expand(2, -1))
    assert got[2:5].isnan().all()
    assert torch.equal(got[5:], alone) and got[5, 5] == bias[5]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("inner", [3, 16, 37])
def test_gated_products(twin: str, inner: int) -> None:
    torch.manual_seed(inner)
    for dtype in DTYPES:
        weight, bias = torch.randn(2 * inner, 130).to(dtype) / 4, torch.randn(2 * inner).to(dtype)
        x = torch.randn(30, 130).to(dtype)
        for own_bias in (None, bias):
            with chosen(twin):
                ready = pack_int8_linear(weight, own_bias, gated=True)
                assert ready.gated == (twin != "reference")
                got = int8_linear(x, ready, float_out=True)
                if ready.gated:
                    assert torch.equal(int8_linear(x[7:8], ready, float_out=True), got[7:8])
            gate, up = truth_of(x, weight, own_bias).chunk(2, dim=1)
            if not ready.gated:
                got = F.silu(got[:, :inner]) * got[:, inner:]
            # Both factors have their errors, and the exponential one of its own.
            assert_accurate(twin, got, F.silu(gate) * up, slack=4 * SLACK)


@pytest.mark.parametrize("twin", TWINS)
def test_rows_of_a_weight(twin: str) -> None:
    torch.manual_seed(4)
    weight, bias, x = torch.randn(100, 70), torch.randn(100), torch.randn(9, 70)
    rows = torch.tensor([99, 0, 31, 32, 0, 64, 17])
    with chosen(twin):
        whole = pack_int8_linear(weight, bias)
        got = int8_linear(x, take_int8_rows(whole, rows))
        assert torch.equal(got, int8_linear(x, whole)[:, rows])


def test_what_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="at most 65536 inputs, got 65537"):
        pack_int8_linear(torch.zeros(1, MAX_INNER + 1), None)
    with pytest.raises(ValueError, match="finite weights"):
        pack_int8_linear(torch.tensor([[1.0, torch.inf]]), None)


def test_the_width_of_x_is_checked() -> None:
    with pytest.raises(ValueError, match=r"x must be \[T, 4\] for a weight of \(3, 4\), got \(2, 5\)"):
        int8_linear(torch.randn(2, 5), pack_int8_linear(torch.randn(3, 4), None))
