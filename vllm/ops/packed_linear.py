"""Matrix products with weights that never change, packed once into the layout the CPU multiplies fastest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm import envs
from vllm.ops._dispatch import cpu_ops, implementation

Layout = Literal["plain", "panels", "onednn"]


@dataclass
class PackedLinear:
    """A weight ready to multiply with.

    Attributes:
        weight: [N, K] when the layout is "plain", else opaque.
        bias: [N] or None.
        layout: "plain", "panels" of our own kernel (csrc/cpu/kernels/linear.cpp), or oneDNN's.
        shape: (N, K).
    """

    weight: Tensor
    bias: Tensor | None
    layout: Layout
    shape: tuple[int, int]


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Take a weight [N, K] and a bias [N] over. `weight` is copied when packing changes its layout.

    Our own kernel adds each output's products in one order, so a row's results do not depend on the batch, and it
    is at least as fast as oneDNN except for bfloat16 on CPUs with matrix tiles or quick dot products: those take
    oneDNN's packed weights. The variable VLLM_CPU_GEMM ("panels" or "onednn") overrides the choice.
    """
    shape = (weight.shape[0], weight.shape[1])
    layout = _layout(weight)
    if layout == "panels":
        return PackedLinear(torch.ops.vllm_cpu.pack_linear(weight), bias, layout, shape)
    if layout == "onednn":
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias, layout, shape)
    return PackedLinear(weight, bias, layout, shape)


def packed_linear(x: Tensor, packed: PackedLinear, float_out: bool = False) -> Tensor:
    """x W^T + bias.

    Args:
        x: [T, K], of the weight's dtype; any strides.
        float_out: ask for the float32 sums before they are rounded to x's dtype. Honoured where the kernel can;
            the result's dtype tells.

    Returns:
        [T, N], contiguous.

    Raises:
        ValueError: the width of x is not K.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(f"x must be [T, {packed.shape[1]}] for a weight of {packed.shape}, got {tuple(x.shape)}")
    if packed.layout == "plain":
        return F.linear(x, packed.weight, packed.bias)
    if packed.layout == "panels":
        return torch.ops.vllm_cpu.linear(x, packed.weight, packed.bias, packed.shape[0], float_out)
    if not x.shape[0]:
        return x.new_empty(0, packed.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed.weight, packed.bias, "none", [], "")


def _layout(weight: Tensor) -> Layout:
    if implementation(weight) != "cpp":
        return "plain"
    if weight.dtype == torch.bfloat16 and _onednn_takes_bf16():
        return "onednn"
    return "panels"


@lru_cache(maxsize=1)
def _onednn_takes_bf16() -> bool:
    wanted = envs.cpu_gemm()
    ops = cpu_ops()
    assert ops is not None
    fastest = wanted == "onednn" if wanted else ops.has_fast_bf16_dot()
    return fastest and torch.backends.mkldnn.is_available()
