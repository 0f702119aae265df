"""Formats' treatment of the inputs of a product: it rounds them to the values of a narrow type, or scales them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from vllm.distributed.communicator import Communicator
from vllm.quantization.bits import FP4_VALUES

_FP8_MAX = 448.0
_FP4_MAX = 6.0


@dataclass(frozen=True)
class InputQuantization:
    """Inputs rounded to 8-bit integers, or to floats of 8 or 4 bits, and multiplied by their scale again: in the dtype
    that they have.

    Attributes:
        kind: the narrow type.
        group_size: inputs that share a scale; None: all of a token.
        symmetric: whether 0 is always the code 0.
        scale, zero_point: of the checkpoint; None: of each token's (or group's) own range.
        global_scale: what scales of groups are multiplied by before they are rounded to fp8; None: they are not.
        group: the ranks that have parts of a token's inputs; None: this one has all.
    """

    kind: Literal["int8", "fp8", "fp4"]
    group_size: int | None = None
    symmetric: bool = True
    scale: float | None = None
    zero_point: float = 0.0
    global_scale: float | None = None
    group: Communicator | None = field(default=None, compare=False)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, K]; a row's result depends on the row alone."""
        if self.scale is not None:
            return self._round(x, x.new_tensor(self.scale), x.new_tensor(self.zero_point))
        groups = x if self.group_size is None else x.unflatten(-1, (-1, self.group_size))
        return self._round(groups, *self._own_range(groups)).view(x.shape)

    @property
    def gives_fp8_rows(self) -> bool:
        """Whether rows are rounded as `fp8_rows` does."""
        return self.kind == "fp8" and self.group_size is None and self.symmetric

    def fp8_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K] -> float8_e4m3fn [T, K] and float32 scales [T, 1], whose product is what `__call__` gives."""
        scale = x.new_full((len(x), 1), self.scale) if self.scale is not None else self._own_range(x)[0]
        return _to_fp8(x / scale), scale.float()

    def _own_range(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of each group."""
        least = groups.amin(-1, keepdim=True).clamp(max=0)
        greatest = groups.amax(-1, keepdim=True).clamp(min=0)
        if self.group is not None and self.group_size is None:
            least = self.group.all_gather(least).amin(0)
            greatest = self.group.all_gather(greatest).amax(0)
        return self._range(least, greatest)

    def over(self, group: Communicator) -> InputQuantization:
        """For a rank that has a part of each token's inputs."""
        return replace(self, group=group)

    def with_scale(self, scale: float, zero_point: float) -> InputQuantization:
        """With a checkpoint's scale."""
        return replace(self, scale=scale, zero_point=zero_point, group_size=None)

    def with_global_scale(self, scale: float) -> InputQuantization:
        """With a checkpoint's scale of scales."""
        return replace(self, global_scale=scale)

    @property
    def _limits(self) -> tuple[float, float]:
        if self.kind == "int8":
            return -128.0, 127.0
        limit = _FP8_MAX if self.kind == "fp8" else _FP4_MAX
        return -limit, limit

    def _range(self, least: Tensor, greatest: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self._limits
        if not self.symmetric:
            scale = _without_zeros((greatest - least) / (high - low))
            return scale, (low - least / scale).clamp(low, high).round()
        scale = torch.maximum(-least, greatest) / ((high - low) / 2)
        if self.global_scale is not None:
            # The scales of fp4 groups are fp8 themselves.
            scale = _to_fp8(scale * self.global_scale).to(scale.dtype)
            scale = torch.where(scale == 0, 0.125, scale) / self.global_scale
        scale = _without_zeros(scale)
        return scale, torch.zeros_like(scale)

    def _round(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        low, high = self._limits
        scaled = (x / scale + zero_point).clamp(low, high)
        if self.kind == "int8":
            codes = scaled.round()
        else:
            codes = (_to_fp8(scaled) if self.kind == "fp8" else _to_fp4(scaled)).to(x.dtype)
        return (codes - zero_point) * scale


@dataclass(frozen=True, eq=False)
class InputScale:
    """Inputs multiplied by `scale` [K], in the dtype that they have."""

    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, K]."""
        return x * self.scale.to(x.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputScale) and self.scale.equal(other.scale)

    def __hash__(self) -> int:
        return hash(self.scale.shape)

    def over(self, group: Communicator) -> InputScale:
        """For a rank that has a part of each token's inputs: the scale has only that."""
        return self


def _without_zeros(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def _to_fp4(x: Tensor) -> Tensor:
    """The nearest of FP4_VALUES, of two the one with an even code."""
    values = torch.tensor(FP4_VALUES[:8], device=x.device)
    borders = (values[1:] + values[:-1]) / 2
    magnitudes = x.float().abs()
    # Half-way values go up where the lower code is odd.
    goes_up = torch.arange(7, device=x.device) % 2 == 1
    above = (magnitudes[..., None] > borders) | (goes_up & (magnitudes[..., None] == borders))
    return values[above.sum(-1)].copysign(x.float())
