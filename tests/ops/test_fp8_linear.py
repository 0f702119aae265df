"""fp8_linear: products in 8-bit floats, on a CPU that stands in for a GPU with units for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from backends import assert_accurate, chosen

from vllm.ops import fp8_linear as module
from vllm.ops.fp8_linear import fp8_linear, takes_fp8
from vllm.ops.quantized_linear import PackedQuantized, pack_quantized
from vllm.ops.quantized_tensor import QuantizedTensor


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_multiplies_fp8", lambda device: True)


def float8_weight(rows: int = 48, width: int = 64) -> QuantizedTensor:
    return QuantizedTensor(torch.randn(rows, width).to(torch.float8_e4m3fn), 8, torch.rand(rows, 1) + 0.1, width)


def pack(weight: QuantizedTensor, bias: torch.Tensor | None = None) -> PackedQuantized:
    with chosen("reference"):
        return pack_quantized(weight, bias)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products(by_rows: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_scales_rows", lambda device: by_rows)
    torch.manual_seed(0)
    weight, bias = float8_weight(), torch.randn(48).to(dtype)
    codes, scales = torch.randn(5, 64).to(torch.float8_e4m3fn), torch.rand(5, 1) + 0.1
    packed = pack(weight, bias)
    assert takes_fp8(packed)
    truth = F.linear(codes.double() * scales.double(), weight.dequantize().double(), bias.double())
    for float_out in (False, True):
        got = fp8_linear(codes, scales, packed, dtype, float_out)
        assert got.dtype == (torch.float32 if float_out else dtype)
        # Sums of 64 products in float32, in any order.
        assert_accurate("cpp", got, truth, slack=4e-6)
        empty = fp8_linear(codes[:0], scales[:0], packed, dtype, float_out)
        assert empty.shape == (0, 48) and empty.dtype == got.dtype


def test_a_build_without_scales_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert module._scales_rows.__wrapped__(device)

    def refuse(*args: object) -> None:
        raise RuntimeError("only scalars")

    monkeypatch.setattr(module, "_scaled_mm", refuse)
    assert not module._scales_rows.__wrapped__(device)


def test_which_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = float8_weight()
    assert takes_fp8(pack(weight))
    others = [
        float8_weight(rows=40),
        float8_weight(width=72),
        replace(weight, group_size=32, scales=torch.rand(48, 2)),
        replace(weight, zero_points=torch.ones(48, 1, dtype=torch.uint8)),
        replace(weight, codes=weight.codes.to(torch.float8_e5m2)),
        replace(weight, codes=weight.codes.view(torch.uint8)),
        replace(weight, input_order=torch.randperm(64)),
    ]
    assert not any(takes_fp8(pack(each)) for each in others)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not takes_fp8(pack(weight))
