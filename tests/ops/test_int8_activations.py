"""quantized_linear with VLLM_CPU_INT8_ACTIVATIONS=1: the product of the weight with rows rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, chosen, strided
from layouts import CPP_LEVELS
from test_quantized_linear import SHAPES, assert_near, random_weight
from torch import Tensor

from vllm.ops.quantized_linear import pack_quantized, quantized_linear, take_quantized_rows
from vllm.ops.quantized_tensor import QuantizedTensor

BLOCK = 32
KINDS = [(kind, 4) for kind in ("plain", "zero", "zeros", "offsets", "half offsets", "super", "super offsets", "order")]
KINDS += [("zeros", bits) for bits in (2, 3, 5, 6, 8)] + [("zero", 6), ("zero", 8), ("super", 3)]


@pytest.fixture(autouse=True)
def int8(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_CPU_INT8_ACTIVATIONS", "1")
    yield


def rounded(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """float64 [T, K]: what is kept of rows. Blocks are of 32, and begin anew with each of the weight's groups."""
    ordered = x.float() if weight.input_order is None else x.float()[:, weight.input_order]
    kept = torch.empty(ordered.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], weight.group_size):
        group = slice(start, start + weight.group_size)
        for block in zip(ordered[:, group].split(BLOCK, 1), kept[:, group].split(BLOCK, 1), strict=True):
            greatest = block[0].abs().amax(1, keepdim=True)
            limit = torch.full_like(greatest, 127)
            integers = (block[0] * (limit / greatest)).nan_to_num().round()
            block[1].copy_(integers.double() * (greatest / limit).double())
    if weight.input_order is None:
        return kept
    return torch.empty_like(kept).index_copy_(1, weight.input_order, kept)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize(("kind", "bits"), KINDS)
@pytest.mark.parametrize(("columns", "inner", "group"), SHAPES)
def test_products(backend: str, kind: str, bits: int, columns: int, inner: int, group: int) -> None:
    torch.manual_seed(columns)
    weight = random_weight(columns, inner, group, kind, bits)
    dense = weight.dequantize().double()
    with chosen(backend):
        packed = pack_quantized(weight, None)
        for dtype in DTYPES:
            x = strided(torch.randn(33, inner) * torch.logspace(-2, 2, 33)[:, None]).to(dtype)
            together = quantized_linear(x, packed, float_out=True)
            kept = rounded(x, weight)
            assert_near(together, F.linear(kept, dense), kept, weight)
            for rows in (0, 1, 2, 3, 4, 5, 13, 25):
                assert torch.equal(quantized_linear(x[:rows], packed), together[:rows].to(dtype))
                assert torch.equal(quantized_linear(x[33 - rows :], packed, float_out=True), together[33 - rows :])


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize(("kind", "bits"), [("zero", 8), ("zeros", 6)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_greatest_sums_do_not_overflow(backend: str, kind: str, bits: int, sign: int) -> None:
    weight = random_weight(40, 4096, 4096, kind, bits)
    weight.codes[:20], weight.codes[20:] = 2**bits - 1, 0
    x = torch.full((3, 4096), float(sign))
    with chosen(backend):
        got = quantized_linear(x, pack_quantized(weight, None))
    assert_near(got, F.linear(x.double(), weight.dequantize().double()), x, weight)


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_rows_that_are_zero_or_not_finite(backend: str) -> None:
    torch.manual_seed(0)
    weight, x, bias = random_weight(40, 64, 32, "zeros"), torch.randn(6, 64), torch.randn(40)
    x[0] = 0
    x[1] *= 1e-38
    x[2, 3], x[3, 7], x[4, 63] = torch.nan, torch.inf, -torch.inf
    with chosen(backend):
        packed = pack_quantized(weight, bias)
        got, alone = quantized_linear(x, packed), quantized_linear(x[5:], packed)
    assert torch.equal(got[:2], bias.expand(2, -1))
    assert got[2:5].isnan().all()
    assert torch.equal(got[5:], alone)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("kind", ["table", "tables", "e8m0 scales", "sparse"])
def test_what_is_not_integers_stays_exact(backend: str, kind: str) -> None:
    torch.manual_seed(1)
    weight, x = random_weight(40, 96, 32, kind), torch.randn(5, 96)
    with chosen(backend):
        got = quantized_linear(x, pack_quantized(weight, None))
    assert_near(got, F.linear(x.double(), weight.dequantize().double()), x, weight)


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_rows_of_a_weight(backend: str) -> None:
    torch.manual_seed(2)
    weight, x, rows = random_weight(70, 96, 32, "zeros"), torch.randn(5, 96), torch.tensor([69, 0, 33])
    with chosen(backend):
        whole = pack_quantized(weight, torch.randn(70))
        assert torch.equal(quantized_linear(x, take_quantized_rows(whole, rows)), quantized_linear(x, whole)[:, rows])
