"""Scales of the layouts that several formats have."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.quantization.stored import FLOATS, StoredTensors

MX_GROUP = 32
"""Inputs that share a power of two in the MX formats."""


def row_scales(stored: StoredTensors, name: str, rows: int) -> Tensor:
    """float32 [N, 1]: a scale for each output, or one for all."""
    scales = stored.tensors[name]
    if scales.numel() == 1:
        return stored.scalar(name).expand(rows, 1)
    return stored.take(name, FLOATS, rows, *(1,) * (scales.dim() - 1)).float().view(rows, 1)


def block_scales(
    stored: StoredTensors, name: str, shape: tuple[int, int], block: tuple[int, int]
) -> tuple[Tensor, int]:
    """float32 [N, G], each block's scale for all of its rows, and the columns of a group."""
    (rows, width), (height, columns) = shape, block
    scales = stored.take(name, (*FLOATS, torch.float8_e8m0fnu), -(-rows // height), -(-width // columns)).float()
    return scales.repeat_interleave(height, 0)[:rows], min(columns, width)


def powers_of_two(stored: StoredTensors, rows: int, width: int) -> Tensor:
    """float8_e8m0fnu [N, K / 32]: the module's weight_scale, which is stored as bytes."""
    return stored.take("weight_scale", torch.uint8, rows, width // MX_GROUP).view(torch.float8_e8m0fnu)
