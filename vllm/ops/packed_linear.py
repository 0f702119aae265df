"""Matrix products with weights that never change, packed once into the layout the CPU multiplies fastest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class PackedLinear:
    """A weight ready to multiply with.

    Attributes:
        weight: [N, K]; opaque when `packed`.
        bias: [N] or None.
        packed: `weight` is in oneDNN's own layout.
        shape: (N, K).
    """

    weight: Tensor
    bias: Tensor | None
    packed: bool
    shape: tuple[int, int]


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Take a weight [N, K] and a bias [N] over. `weight` is copied when packing changes its layout.

    bfloat16 on a CPU is packed: without it oneDNN reorders the weight in every call.
    """
    shape = (weight.shape[0], weight.shape[1])
    if not _packs(weight):
        return PackedLinear(weight, bias, False, shape)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return PackedLinear(packed, bias, True, shape)


def packed_linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x W^T + bias.

    Args:
        x: [T, K], of the weight's dtype; any strides.

    Returns:
        [T, N], contiguous.

    Raises:
        ValueError: the width of x is not K.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(
            f"x must be [T, {packed.shape[1]}] for a weight of {packed.shape}, got {tuple(x.shape)}"
        )
    if not packed.packed:
        return F.linear(x, packed.weight, packed.bias)
    if not x.shape[0]:
        return x.new_empty(0, packed.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed.weight, packed.bias, "none", [], "")


def _packs(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
    )
