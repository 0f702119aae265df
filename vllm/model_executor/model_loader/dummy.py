"""Random weights instead of a checkpoint's, for measuring a shape whose weights are not at hand."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from vllm.model_executor.model_loader.weights import checkpoint_slots

_STD = 0.02


def fill_with_noise(model: nn.Module, seed: int) -> None:
    """Fill every weight that a checkpoint would with `dummy_weight`, a rank of several with its part of it."""
    for name, slot in checkpoint_slots(model).items():
        slot.fill(dummy_weight(name, slot.shape, slot.target.dtype, slot.target.device, seed))


def dummy_weight(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, seed: int
) -> Tensor:
    """A checkpoint's tensor of that name: normal numbers with a standard deviation of 0.02, plus 1 in the vectors that
    scale a norm, without which nothing would come through a layer.

    The same arguments give the same tensor, in any process; another device or dtype gives another one.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _STD, generator=generator)
    is_scale = len(shape) == 1 and name.endswith(".weight")
    return values.add_(1.0) if is_scale else values
