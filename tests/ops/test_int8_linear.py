"""int8_linear: every backend against the products of integers that the definition gives, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, chosen, remembered, strided
from layouts import LEVELS
from torch import Tensor

from vllm.ops import int8_linear as int8_module
from vllm.ops.int8_linear import int8_linear, pack_int8_linear, take_int8_rows

# Below, at and above a panel's 32 columns, a block's 64 inputs and a group's 128.
SHAPES = [(1, 1), (31, 7), (32, 64), (33, 65), (40, 128), (70, 257), (130, 600)]
# Around every tile height, and enough for blocks of rows.
ROWS = [0, 1, 2, 3, 4, 7, 8, 15, 130]
# Sums of a group are exact; then three roundings a group, and three more.
SLACK = 2e-6
BLOCK, GROUP = 64, 128


def hadamard() -> Tensor:
    """float32 [64, 64]."""
    i = torch.arange(BLOCK)
    common = i[:, None] & i
    odd = sum((common >> bit) & 1 for bit in range(6)) % 2
    return 1.0 - 2.0 * odd


def rotated(values: Tensor) -> Tensor:
    """[T, G, 128] of [T, K]: by the float32 sums and differences of the definition, which decide how ties fall."""
    blocks = F.pad(values.float(), (0, -values.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    for bit in range(6):
        sign = 1.0 - 2.0 * ((torch.arange(BLOCK) >> bit) & 1)
        blocks = blocks * sign + blocks[:, :, torch.arange(BLOCK) ^ (1 << bit)]
    return F.pad(blocks.flatten(1), (0, -blocks.shape[1] * BLOCK % GROUP)).unflatten(1, (-1, GROUP))


def quantised(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of activations' groups [T, G, 128], and float32 scales [T, G, 1]."""
    greatest = groups.abs().amax(2, keepdim=True)
    limit = torch.full_like(greatest, 127)
    return (groups * (limit / greatest)).nan_to_num().round(), greatest / limit


def quantised_weight(weight: Tensor) -> Tensor:
    """float64 [N, G, 128]: what is kept of a weight, rotated and divided by 64."""
    groups = rotated(weight) / BLOCK
    scales = (groups.abs().amax(2, keepdim=True) / 127 * (1 + 2**-8)).bfloat16().float()
    return (groups / scales).nan_to_num().round().double() * scales.double()


@remembered
def truth_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float64."""
    integers, scales = quantised(rotated(x))
    product = (integers.double() * scales.double()).flatten(1) @ quantised_weight(weight).flatten(1).T
    return product if bias is None else product + bias.double()


def rows_with_outliers(rows: int, inner: int) -> Tensor:
    """Like activations: rows of different sizes, some with one huge value."""
    x = torch.randn(rows, inner) * torch.logspace(-3, 3, rows)[:, None]
    x[::3, inner // 2] *= 300
    return x


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_products(backend: str, dtype: torch.dtype, columns: int, inner: int) -> None:
    torch.manual_seed(columns)
    weight, bias = strided(torch.randn(columns, inner)).to(dtype), torch.randn(columns).to(dtype)
    # float16 ends at 65504.
    x = strided(rows_with_outliers(max(ROWS), inner).clamp(-60000, 60000)).to(dtype)
    for own_bias in (None, bias):
        with chosen(backend):
            ready = pack_int8_linear(weight, own_bias)
            for rows in ROWS:
                got, unrounded = int8_linear(x[:rows], ready), int8_linear(x[:rows], ready, float_out=True)
                assert (got.dtype, unrounded.dtype) == (dtype, torch.float32)
                assert got.is_contiguous() and torch.equal(got, unrounded.to(dtype))
                assert_accurate(backend, unrounded, truth_of(x[:rows], weight, own_bias), slack=SLACK)


def test_the_rotation() -> None:
    """The tests take a Hadamard transform for it: a matrix of 1 and -1 with orthogonal rows."""
    x = torch.randn(5, BLOCK)
    assert torch.equal(hadamard() @ hadamard(), BLOCK * torch.eye(BLOCK))
    torch.testing.assert_close(rotated(x)[:, 0, :BLOCK], x @ hadamard())


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("inner", [30, 64, 300])
def test_near_the_unquantised_product(backend: str, inner: int) -> None:
    """No output is further off than half a step of each factor allows, summed over the rotated values."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, inner), rows_with_outliers(20, inner)
    with chosen(backend):
        got = int8_linear(x, pack_int8_linear(weight, None)).double()
    a, w = rotated(x).double(), rotated(weight).double() / BLOCK
    half_a = (a.abs().amax(2, keepdim=True) / 127 / 2).expand_as(a)
    half_w = (w.abs().amax(2, keepdim=True) / 127 * (1 + 2**-7) / 2).expand_as(w)
    allowed = a.abs().flatten(1) @ half_w.flatten(1).T + half_a.flatten(1) @ (w.abs() + half_w).flatten(1).T
    assert ((got - x.double() @ weight.double().T).abs() <= 1.0001 * allowed).all()


@pytest.mark.parametrize("backend", LEVELS)
def test_an_outlier_does_not_take_the_resolution_from_its_row(backend: str) -> None:
    """One value of 576 a hundred times larger: rounded as they are, with one scale, rows would be off by 0.22."""
    torch.manual_seed(7)
    weight, x = torch.randn(64, 576), torch.randn(30, 576)
    weight[:, 100] = 0
    x[:, 100] = 100
    with chosen(backend):
        got = int8_linear(x, pack_int8_linear(weight, None)).double()
    product = x.double() @ weight.double().T
    assert (got - product).norm() / product.norm() < 0.05


@remembered
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("inner", [1500, 65536])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_greatest_sums_do_not_overflow(backend: str, inner: int, sign: int) -> None:
    """Rows of the transform itself: a rotated block has one value, and the others are zero, or all are equal."""
    rows = hadamard().repeat(1, -(-inner // BLOCK))[:, :inner]
    ones = torch.zeros(1, inner)
    ones[:, ::BLOCK] = 1
    weight, x = torch.cat([rows, ones]), sign * torch.cat([rows, ones])
    with chosen(backend):
        got = int8_linear(x, pack_int8_linear(weight, None))
    torch.testing.assert_close(got.double(), truth_of(x, weight, None), rtol=1e-5, atol=1e-3)
    # A weight's scale is kept in bfloat16, rounded up, and its integers are off by up to a half.
    torch.testing.assert_close(got.double(), product(x, weight), rtol=0.02, atol=0.02 * inner / BLOCK)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(200, 520).to(dtype), rows_with_outliers(300, 520).clamp(-6e4, 6e4).to(dtype)
    with chosen(backend):
        ready = pack_int8_linear(weight, None)
        together = int8_linear(x, ready, float_out=True)
        for rows in (1, 2, 3, 5, 7, 14, 64):
            for first in (0, 17, 236):
                assert torch.equal(
                    int8_linear(x[first : first + rows], ready, float_out=True), together[first : first + rows]
                )


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_zero_tiny_or_not_finite(backend: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    weight, bias = torch.randn(40, 50).to(dtype), torch.randn(40).to(dtype)
    x = torch.randn(6, 50).to(dtype)
    x[0] = 0
    x[1] *= 1e-38
    x[2, 3], x[3, 7], x[4, 49] = torch.nan, torch.inf, -torch.inf
    weight[5] = 0
    with chosen(backend):
        got = int8_linear(x, pack_int8_linear(weight, bias))
        alone = int8_linear(x[5:], pack_int8_linear(weight, bias))
    assert torch.equal(got[:2], bias.expand(2, -1))
    assert got[2:5].isnan().all()
    assert torch.equal(got[5:], alone) and got[5, 5] == bias[5]


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_whose_rotation_overflows_are_nan_alone(backend: str, dtype: torch.dtype) -> None:
    """Finite values, whose sums are infinite in some places of their block and zero in others."""
    torch.manual_seed(5)
    weight, x = torch.randn(40, 200).to(dtype), torch.randn(3, 200).to(dtype)
    x[1, 70], x[1, 71] = 3e38, -3e38
    with chosen(backend):
        ready = pack_int8_linear(weight, None)
        got, alone = int8_linear(x, ready), int8_linear(x[2:], ready)
    assert got[1].isnan().all()
    assert got[0].isfinite().all() and torch.equal(got[2:], alone)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("inner", [3, 16, 37])
def test_gated_products(backend: str, inner: int) -> None:
    torch.manual_seed(inner)
    for dtype in DTYPES:
        weight, bias = torch.randn(2 * inner, 130).to(dtype) / 4, torch.randn(2 * inner).to(dtype)
        x = torch.randn(30, 130).to(dtype)
        for own_bias in (None, bias):
            with chosen(backend):
                ready = pack_int8_linear(weight, own_bias, gated=True)
                assert ready.gated == (backend != "reference")
                got = int8_linear(x, ready, float_out=True)
                if ready.gated:
                    assert torch.equal(int8_linear(x[7:8], ready, float_out=True), got[7:8])
            gate, up = truth_of(x, weight, own_bias).chunk(2, dim=1)
            if not ready.gated:
                got = F.silu(got[:, :inner]) * got[:, inner:]
            # Both factors have their errors, and the exponential one of its own.
            assert_accurate(backend, got, F.silu(gate) * up, slack=4 * SLACK)


@pytest.mark.parametrize("backend", LEVELS)
def test_rows_of_a_weight(backend: str) -> None:
    torch.manual_seed(4)
    weight, bias, x = torch.randn(100, 70), torch.randn(100), torch.randn(9, 70)
    rows = torch.tensor([99, 0, 31, 32, 0, 64, 17])
    with chosen(backend):
        whole = pack_int8_linear(weight, bias)
        got = int8_linear(x, take_int8_rows(whole, rows))
        assert torch.equal(got, int8_linear(x, whole)[:, rows])


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_what_is_packed_has_the_bits_of_the_definition(
    backend: str, dtype: torch.dtype, columns: int, inner: int
) -> None:
    torch.manual_seed(columns)
    weight = strided(torch.randn(columns, inner) * torch.logspace(-30, 3, columns)[:, None]).to(dtype)
    weight[0] = 0
    with chosen("reference"):
        expected = pack_int8_linear(weight, None)
    with chosen(backend):
        packed = pack_int8_linear(weight, None)
        if packed.layout == "packed":
            expected = int8_module._arrange(expected.weight, expected.scales, None, expected.shape)
        assert torch.equal(packed.weight, expected.weight)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("gated", [False, True])
def test_parts_are_packed_as_their_whole(backend: str, gated: bool) -> None:
    for dtype in DTYPES:
        parts = [torch.randn(count, 150).to(dtype) for count in ((43, 43) if gated else (1, 32, 50))]
        bias = torch.randn(sum(map(len, parts))).to(dtype)
        with chosen(backend):
            ready, whole = (pack_int8_linear(weight, bias, gated=gated) for weight in (parts, torch.cat(parts)))
        assert torch.equal(ready.weight, whole.weight) and torch.equal(ready.bias, whole.bias)
        assert (ready.shape, ready.gated) == (whole.shape, whole.gated)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_cannot_be_packed(backend: str, value: float) -> None:
    weight = torch.ones(40, 200)
    weight[33, 199] = value
    with chosen(backend), pytest.raises(ValueError, match="finite weights"):
        pack_int8_linear(weight, None)


def test_the_width_of_x_is_checked() -> None:
    with pytest.raises(ValueError, match=r"x must be \[T, 4\] for a weight of \(3, 4\), got \(2, 5\)"):
        int8_linear(torch.randn(2, 5), pack_int8_linear(torch.randn(3, 4), None))
