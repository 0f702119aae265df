"""Products of each head's values with a matrix of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation
from vllm.ops.invariant_linear import has_invariant_linear, invariant_linear
from vllm.ops.packed_linear import Layout, bf16_layout, pack_as


@dataclass
class PackedHeads:
    """Matrices ready to multiply with.

    Attributes:
        weight: [H, N, K], or, if `packed`, [H, size of one] in the layout of our kernel.
        shape: (H, N, K).
    """

    weight: Tensor
    shape: tuple[int, int, int]
    packed: bool = False


def pack_heads(weight: Tensor) -> PackedHeads:
    """Take [H, N, K] over, which is copied."""
    shape = (weight.shape[0], weight.shape[1], weight.shape[2])
    if implementation(weight) != "cpp":
        return PackedHeads(weight.contiguous(), shape)
    in_pairs = weight.dtype == torch.bfloat16 and weight.shape[2] % 2 == 0
    in_pairs = in_pairs and bf16_layout(float_out=True) == "packed_bf16_dot"
    layout: Layout = "packed_bf16_dot" if in_pairs else "packed_f32"
    return PackedHeads(torch.stack([pack_as(head.contiguous(), layout) for head in weight]), shape, True)


def head_linear(x: Tensor, packed: PackedHeads) -> Tensor:
    """x[:, h] W[h]^T of every head h: [T, H, N], contiguous, of x's dtype, summed in float32.

    `x` is [T, H, K] of the weight's dtype; its last dimension is contiguous. A row's values do not depend on the other
    rows. ValueError: x has other heads or another width than the weight.
    """
    heads, columns, width = packed.shape
    if tuple(x.shape[1:]) != (heads, width):
        raise ValueError(f"x must be [T, {heads}, {width}], got {tuple(x.shape)}")
    if packed.packed:
        return torch.ops.vllm_cpu.head_linear(x, packed.weight, columns)
    if has_invariant_linear(x):
        return torch.stack([invariant_linear(x[:, head], packed.weight[head]) for head in range(heads)], dim=1)
    return torch.bmm(x.transpose(0, 1), packed.weight.transpose(1, 2)).transpose(0, 1).contiguous()
