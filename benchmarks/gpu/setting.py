"""Inputs and results of every case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.sizes import Sizes

Case = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """Inputs of every case.

    Attributes:
        folder: where models' configurations are written.
        rates: measured rates of the GPU, if any: copy_bytes_per_second, matrix_flops_per_second.
    """

    device: torch.device
    sizes: Sizes
    seed: int
    folder: Path
    rates: dict[str, float]

    def generator(self, salt: int = 0) -> torch.Generator:
        """The device's random numbers of this run."""
        return torch.Generator(self.device).manual_seed(self.seed + salt)


def make_row(
    name: str, work: str, value: float, target: float | None, unit: str, at_least: bool = True
) -> dict[str, Any]:
    """A line of the table.

    Args:
        value: a ratio (unit "x"), a share of the copy bandwidth ("of copy bandwidth") or MiB.
        target: for `value` to reach; None = only reported.
        at_least: whether more is better.
    """
    met = None if target is None else (value >= target if at_least else value <= target)
    return {"row": name, "work": work, "value": value, "target": target, "unit": unit, "at_least": at_least, "met": met}


class Inputs:
    """Random tensors on the device."""

    def __init__(self, setting: Setting) -> None:
        self.device = setting.device
        self._generator = setting.generator()

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device, generator=self._generator) * scale).to(dtype)

    def integers(self, limit: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(limit, shape, device=self.device, generator=self._generator, dtype=dtype)
