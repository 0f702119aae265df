"""Matrix products with weights that never change, packed once into the layout the CPU multiplies fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm import envs
from vllm.ops._dispatch import ISA_LEVELS, cpu_ops, implementation
from vllm.ops.rms_norm import AddedNorm

Layout = Literal["plain", "panels", "pairs", "halves", "onednn"]

# Of our own kernel; the first two hold the weight as it was.
EXACT = ("panels", "pairs")
_OWN = (*EXACT, "halves")

PANEL = 32
# A column's greatest magnitude in float16: see HalfProduct in csrc/cpu/kernels/linear.cpp.
_COLUMN_EXPONENT = 4


@dataclass
class PackedLinear:
    """A weight ready to multiply with.

    Attributes:
        weight: [N, K] when the layout is "plain", else opaque.
        bias: [N] or None.
        layout: "plain", "panels", "pairs" or "halves" of our own kernel (csrc/cpu/kernels/linear.cpp), or oneDNN's.
        shape: (N, K).
        scales: float32 [N, filled up to whole panels], what the products with "halves" are multiplied with; else None.
        gated: the product is silu(x G^T + b) * (x U^T + c), where G and U are the weight's two halves of rows.
    """

    weight: Tensor
    bias: Tensor | None
    layout: Layout
    shape: tuple[int, int]
    scales: Tensor | None = None
    gated: bool = False


def pack_linear(weight: Tensor, bias: Tensor | None, float_out: bool = False, gated: bool = False) -> PackedLinear:
    """Take a weight [N, K] and a bias [N] over. `weight` is copied when packing changes its layout.

    Our own kernel adds each output's products in one order, so a row's results do not depend on the batch, and it
    is at least as fast as oneDNN except for bfloat16 on CPUs with matrix tiles: those take oneDNN's packed weights.
    Where the CPU has quick dot products of bfloat16, such weights are laid out in "pairs" for them; where it has
    float16 arithmetic, they become "halves": the same values, scaled, whose products are summed in float16 up to 64 at
    a time. The variable VLLM_CPU_GEMM ("panels", "pairs", "halves" or "onednn") overrides the choice;
    VLLM_BATCH_INVARIANT=1 rules oneDNN out.

    Args:
        float_out: the products are to be had in float32, so they are summed in nothing less.
        gated: multiply to silu(x G^T + b) * (x U^T + c) at once, if the layout can: the result's `gated` tells.
    """
    shape = (weight.shape[0], weight.shape[1])
    layout = _layout(weight, float_out)
    if gated and layout in _OWN:
        packed = pack_linear(interleave_gate(weight), None if bias is None else interleave_gate(bias), float_out)
        return replace(packed, shape=shape, gated=True)
    if layout == "halves":
        halves, scales = _scaled_halves(weight)
        return PackedLinear(torch.ops.vllm_cpu.pack_linear(halves), bias, layout, shape, scales)
    if layout in _OWN:
        return PackedLinear(pack_as(weight, layout), bias, layout, shape)
    if layout == "onednn":
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias, layout, shape)
    return PackedLinear(weight, bias, layout, shape)


def pack_as(weight: Tensor, layout: Layout) -> Tensor:
    """The memory of our own kernel's `layout` with the values of a weight [N, K]; K is even for "pairs"."""
    return torch.ops.vllm_cpu.pack_linear(weight, layout == "pairs")


def packed_linear(x: Tensor, packed: PackedLinear, float_out: bool = False, norm: AddedNorm | None = None) -> Tensor:
    """x W^T + bias, or norm(x) W^T + bias.

    Args:
        x: [T, K], of the weight's dtype; any strides.
        float_out: ask for the float32 sums before they are rounded to x's dtype. Honoured where the kernel can;
            the result's dtype tells.
        norm: applied to x first, which is added to the norm's residual in place; the same bits as by itself, but
            where the kernel can without its result in memory.

    Returns:
        [T, N], or [T, N / 2] when `packed.gated`; contiguous.

    Raises:
        ValueError: the width of x is not K.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(f"x must be [T, {packed.shape[1]}] for a weight of {packed.shape}, got {tuple(x.shape)}")
    if packed.layout in _OWN:
        columns = packed.shape[0] // 2 if packed.gated else packed.shape[0]
        return torch.ops.vllm_cpu.linear(
            x, packed.weight, packed.bias, columns, float_out, packed.scales, packed.gated, *(norm or ())
        )
    if norm is not None:
        x = norm(x)
    if packed.layout == "plain":
        return F.linear(x, packed.weight, packed.bias)
    if not x.shape[0]:
        return x.new_empty(0, packed.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed.weight, packed.bias, "none", [], "")


def _layout(weight: Tensor, float_out: bool) -> Layout:
    if implementation(weight) != "cpp":
        return "plain"
    if weight.dtype != torch.bfloat16:
        return "panels"
    layout = _bf16_layout()
    if (layout == "halves" and float_out) or (layout == "pairs" and weight.shape[1] % 2):
        return "panels"
    return layout


def _bf16_layout() -> Layout:
    ops = cpu_ops()
    assert ops is not None
    wanted = envs.cpu_gemm()
    onednn_is_asked_for = wanted == "onednn" or (not wanted and ops.has_bf16_tiles())
    if onednn_is_asked_for and torch.backends.mkldnn.is_available() and not envs.batch_invariant():
        return "onednn"
    if wanted == "pairs" or (not wanted and ops.has_fast_bf16_dot()):
        return "pairs"
    has_float16 = ISA_LEVELS[ops.set_isa(-1)] == "avx512_fp16"
    return "halves" if wanted == "halves" or (not wanted and has_float16) else "panels"


def interleave_gate(halves: Tensor) -> Tensor:
    """[2 I, ...] -> the same rows by 16 of the first half and 16 of the second in turn, zeros after either's last."""
    parts = halves.unflatten(0, (2, -1))
    missing = -parts.shape[1] % (PANEL // 2)
    if missing:
        parts = torch.cat([parts, parts.new_zeros(2, missing, *parts.shape[2:])], dim=1)
    return parts.unflatten(1, (-1, PANEL // 2)).transpose(0, 1).flatten(0, 2).contiguous()


def _scaled_halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 [N, K] -> float16 [N, K], and float32 [N up to whole panels] that undoes its scaling.

    A column is scaled by a power of two. Down to 2^-19 of its greatest value all others are exact; float16's
    subnormal numbers hold the rest, to 2^-30 of the greatest.
    """
    plain = weight.float()
    _, exponents = plain.abs().amax(dim=1).frexp()
    # Within what a float32 can scale by; a column of zeros has exponent 0.
    exponents = (exponents - 1).clamp(-120, 120)
    halves = plain.ldexp_((_COLUMN_EXPONENT - exponents)[:, None]).half()
    scales = torch.zeros((len(weight) + PANEL - 1) // PANEL * PANEL)
    scales[: len(weight)] = torch.ones(len(weight)).ldexp_(exponents - _COLUMN_EXPONENT)
    return halves, scales
