"""Rows of a weight that is packed already: as they were, or packed again for a product of those outputs alone."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.packed_linear import EXACT, PackedLinear, pack_as


def take_packed_rows(packed: PackedLinear, rows: Tensor) -> PackedLinear:
    """The weight W[rows] and its bias, packed as `packed` is.

    A product by our own kernel gives the very bits of the whole product's columns; "plain" ones may differ in rounding,
    as libraries choose the order of their sums by the shape.

    Args:
        packed: of a weight [N, K]; its layout is "plain" or one of EXACT.
        rows: int64 [I] in [0, N), on the weight's device, in any order and not necessarily distinct.

    Returns:
        A packed weight [I, K] of its own memory.

    Raises:
        ValueError: another layout.
    """
    bias = None if packed.bias is None else packed.bias[rows]
    shape = (len(rows), packed.shape[1])
    if packed.layout == "plain":
        return PackedLinear(packed.weight[rows], bias, "plain", shape)
    return PackedLinear(pack_as(packed_embedding(rows, packed), packed.layout), bias, packed.layout, shape)


def packed_embedding(token_ids: Tensor, packed: PackedLinear) -> Tensor:
    """The rows of a weight [V, H] that `token_ids` name, to the bit.

    Args:
        token_ids: int32 or int64 [T], each in [0, V); contiguous.
        packed: of that weight; its layout is one of EXACT.

    Returns:
        [T, H].

    Raises:
        ValueError: another layout.
    """
    if packed.layout not in EXACT:
        raise ValueError(f"packed must have one of the layouts {', '.join(EXACT)}, got {packed.layout!r}")
    return torch.ops.vllm_cpu.panel_rows(packed.weight, token_ids, packed.shape[0])
