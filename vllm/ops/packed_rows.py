"""A few rows of a weight that is packed already: what a product of those outputs alone needs."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.packed_linear import PackedLinear


def take_packed_rows(packed: PackedLinear, rows: Tensor) -> PackedLinear | None:
    """The weight W[rows] and its bias, packed as `packed` is.

    Args:
        packed: of a weight [N, K].
        rows: int64 [I] in [0, N), on the weight's device, in any order and not necessarily distinct.

    Returns:
        A packed weight [I, K] of its own memory; None for oneDNN's layout, which hides where a row is. A product
        with "panels" gives the very bits of the whole product's columns; "plain" ones may differ in rounding, as
        libraries choose the order of their sums by the shape.
    """
    if packed.layout == "onednn":
        return None
    bias = None if packed.bias is None else packed.bias[rows]
    shape = (len(rows), packed.shape[1])
    if packed.layout == "plain":
        return PackedLinear(packed.weight[rows], bias, "plain", shape)
    width = packed.weight.shape[2]
    # The kernel orders a panel's columns to its liking; where each one went shows by packing their numbers.
    numbers = torch.arange(width, dtype=packed.weight.dtype)[:, None]
    place = torch.ops.vllm_cpu.pack_linear(numbers).flatten().argsort()
    plain = packed.weight[rows // width, :, place[rows % width]]
    return PackedLinear(torch.ops.vllm_cpu.pack_linear(plain), bias, "panels", shape)
