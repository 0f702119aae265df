"""Experts of a mixture against float64, with plain and with quantised weights."""

from __future__ import annotations

import torch
from bounds import ModelShape
from torch import Tensor

from gpu.setting import Inputs, Setting
from vllm.ops.experts import ExpertActivation, PackedExperts, experts
from vllm.ops.packed_linear import pack_linear, packed_linear
from vllm.ops.quantized_linear import pack_quantized, quantized_linear
from vllm.ops.quantized_tensor import QuantizedTensor

_EXPERTS, _TOP_K, _GROUP = 16, 4, 32

# Each expert's dense weight and bias.
_Dense = list[tuple[Tensor, Tensor]]


def check_experts(setting: Setting, shape: ModelShape, is_quantized: bool) -> None:
    """Alone and in a batch, of which a graph's replay with other tokens has the bits."""
    make, width, size = Inputs(setting), shape.hidden_size, max(32, shape.intermediate_size // 4)
    first, second = PackedExperts.empty(_EXPERTS, gated=True), PackedExperts.empty(_EXPERTS)
    dense: tuple[_Dense, _Dense] = [], []
    for _ in range(_EXPERTS):
        for packed, own, (rows, inner) in zip((first, second), dense, ((2 * size, width), (width, size)), strict=True):
            own.append(_put(make, packed, len(own), rows, inner, is_quantized))

    def choices(rows: int) -> list[Tensor]:
        ids = make.normal(rows, _EXPERTS).topk(_TOP_K).indices.int()
        return [make.normal(rows, width, dtype=torch.bfloat16), ids, make.normal(rows, _TOP_K)]

    def run(inputs: list[Tensor]) -> Tensor:
        return experts(*inputs, first, second, ExpertActivation())

    for rows in (1, setting.sizes.reading_rows):
        inputs = choices(rows)
        got, (truth, allowed) = run(inputs), _truth(inputs, *dense)
        assert ((got.double() - truth).abs() <= allowed).all()
        if setting.device.type != "cuda":
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(inputs)
        for own, other in zip(inputs, choices(rows), strict=True):
            own.copy_(other)
        graph.replay()
        assert torch.equal(out, run(inputs)), "a replay differs"


def _put(
    make: Inputs, packed: PackedExperts, index: int, rows: int, inner: int, is_quantized: bool
) -> tuple[Tensor, Tensor]:
    """Give an expert random weights: of 4 bits with zero points, as GPTQ's, or of bfloat16; as dense ones."""
    bias = make.normal(rows).bfloat16()
    if not is_quantized:
        weight = (make.normal(rows, inner) / inner**0.5).bfloat16()
        packed.put(index, pack_linear(weight, bias), packed_linear)
        return weight.double(), bias.double()
    codes = make.integers(16, rows, inner, dtype=torch.uint8)
    # A code is some 5 from its zero point.
    scales = (make.normal(rows, inner // _GROUP).abs() / (5 * inner**0.5)).half()
    zeros = make.integers(16, *scales.shape, dtype=torch.uint8)
    quantized = QuantizedTensor(codes, 4, scales, _GROUP, zero_points=zeros)
    packed.put(index, pack_quantized(quantized, bias), quantized_linear)
    return quantized.dequantize().double(), bias.double()


def _truth(inputs: list[Tensor], first: _Dense, second: _Dense) -> tuple[Tensor, Tensor]:
    """In float64, and what rounding between the products and at the end may add."""
    hidden, ids, weights = inputs
    truth, allowed = (torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device) for _ in range(2))
    for index, ((one, one_bias), (other, other_bias)) in enumerate(zip(first, second, strict=True)):
        gate, up = (hidden.double() @ one.T + one_bias).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        own = torch.where(ids == index, weights, 0.0).double().sum(1, keepdim=True)
        truth += own * (inner @ other.T + other_bias)
        allowed += own.abs() * (inner.abs() @ other.abs().T)
    # Triton's interpreter cuts off what it should round to bfloat16.
    rounding = 2**-8 if hidden.device.type == "cuda" else 2**-7
    return truth, rounding * (truth.abs() + allowed) + 1e-5
