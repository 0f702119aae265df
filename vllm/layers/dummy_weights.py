"""Random weights, for models that are made up."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_STD = 0.02


def dummy_weight(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, seed: int
) -> Tensor:
    """A checkpoint's tensor of that name: normal numbers with a standard deviation of 0.02, plus 1 in the vectors that
    scale a norm. Equal arguments give equal tensors, in any process; another device or dtype gives another one."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _STD, generator=generator)
    is_scale = len(shape) == 1 and name.endswith(".weight")
    return values.add_(1.0) if is_scale else values
