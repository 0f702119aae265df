"""The Triton kernel of quantized_linear, in the interpreter or compiled, against float64."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from backends import chosen, strided
from test_quantized_linear import EACH_KIND, assert_near, float8_weight, random_weight

from vllm.ops.quantized_linear import pack_quantized, quantized_linear
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.triton.quantized_linear import can_multiply

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SHAPES = [(70, 96, 16), (5, 50, 50)]


def check(weight: QuantizedTensor, rows: int) -> None:
    dense = weight.dequantize().double()
    for dtype in (torch.bfloat16, torch.float16):
        x, bias = strided(torch.randn(rows, weight.shape[1])).to(dtype), torch.randn(weight.shape[0]).to(dtype)
        assert can_multiply(x, weight) == (weight.sparse is None and not weight.is_plain)
        with chosen("triton"), warnings.catch_warnings():
            # The interpreter's NumPy remarks on NaN, which codes beyond the last one may stand for.
            warnings.simplefilter("ignore", RuntimeWarning)
            got = quantized_linear(x.to(DEVICE), pack_quantized(on_device(weight), bias.to(DEVICE)), float_out=True)
        truth = F.linear(x.double(), dense, bias.double())
        # A table's values are kept to twice the dtype's bits; in the interpreter bfloat16 is float32.
        slack = 16 if weight.values is not None and DEVICE == "cuda" else 1
        assert_near(got.cpu(), truth, slack * x, weight)


def on_device(weight: QuantizedTensor) -> QuantizedTensor:
    tensors = {each.name: getattr(weight, each.name) for each in fields(weight)}
    moved = {name: part.to(DEVICE) for name, part in tensors.items() if isinstance(part, torch.Tensor)}
    return replace(weight, **moved)


@pytest.mark.parametrize(("kind", "bits"), EACH_KIND)
@pytest.mark.parametrize(("columns", "inner", "group"), SHAPES)
def test_products(kind: str, bits: int, columns: int, inner: int, group: int) -> None:
    torch.manual_seed(columns)
    check(random_weight(columns, inner, group, kind, bits), 3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_products_of_float8(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check(float8_weight(70, 128, 64, dtype), 20)


def test_many_rows() -> None:
    torch.manual_seed(2)
    check(random_weight(70, 128, 64, "zeros"), 70)


def test_what_the_kernel_does_not_take_is_the_reference_s() -> None:
    torch.manual_seed(3)
    weight = random_weight(5, 60, 12, "zeros")
    x = torch.randn(3, 60).bfloat16()
    assert not can_multiply(x, weight) and not can_multiply(x.float(), random_weight(5, 64, 16, "zeros"))
    with chosen("triton"):
        got = quantized_linear(x, pack_quantized(weight, None), float_out=True)
    assert_near(got, F.linear(x.double(), weight.dequantize().double()), x, weight)
