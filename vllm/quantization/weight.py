"""A quantised weight on its way from a checkpoint to the layer that holds a part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.quantization.activations import InputQuantization, InputScale


@dataclass
class QuantizedWeight:
    """A weight as a format makes it of a module's tensors.

    Attributes:
        tensor: the weight [N, K].
        source: the checkpoint's name of the tensor that has the codes, for errors.
        inputs: what the format does to the activations that the weight is multiplied with; None: nothing.
    """

    tensor: QuantizedTensor
    source: str
    inputs: InputQuantization | InputScale | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.tensor.shape

    def dequantize(self) -> Tensor:
        """float32 [N, K]: what unchanged inputs are multiplied with."""
        plain = self.tensor.dequantize()
        return plain * self.inputs.scale.float() if isinstance(self.inputs, InputScale) else plain

    def take_rows(self, rows: Tensor) -> QuantizedWeight:
        """The weight's `rows`, int64 [I]."""
        if torch.equal(rows, torch.arange(self.shape[0])):
            return self
        return replace(self, tensor=self.tensor.take_rows(rows))

    def to(self, device: torch.device) -> QuantizedWeight:
        """The weight on a device."""
        tensor = self.tensor
        if device == tensor.codes.device:
            return self
        if device.type != "cpu":
            tensor = replace(tensor, codes=tensor.plain_codes())
        return replace(self, tensor=_moved(tensor, device), inputs=_moved(self.inputs, device))

    def take_columns(self, columns: range) -> QuantizedWeight:
        """The weight's part for the inputs in `columns`. ValueError: they begin or end inside of a group."""
        if columns == range(self.shape[1]):
            return self
        inputs = self.inputs
        if isinstance(inputs, InputScale):
            inputs = InputScale(inputs.scale[columns.start : columns.stop])
        if self.tensor.input_order is not None:
            tensor = _take_ordered(self.tensor, self.tensor.input_order, columns)
            return replace(self, tensor=tensor, inputs=inputs)
        try:
            tensor = self.tensor.take_columns(columns.start, columns.stop)
        except ValueError as error:
            raise ValueError(
                f"{self.source}: tensor parallelism splits its {self.shape[1]} inputs inside of a group: {error}"
            ) from None
        return replace(self, tensor=tensor, inputs=inputs)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{each.name: _moved(getattr(value, each.name), device) for each in fields(value)})


@dataclass
class QuantizedStack:
    """Weights [E, N, K], each of which is one or several below each other.

    Attributes:
        orders: of each weight, the places int64 [N] that these rows have in it; None: they are in order.
    """

    weights: list[list[QuantizedWeight]]
    orders: list[Tensor | None] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        first = self.weights[0]
        return len(self.weights), sum(part.shape[0] for part in first), first[0].shape[1]

    @property
    def source(self) -> str:
        """See QuantizedWeight."""
        return self.weights[0][0].source

    def order(self, index: int) -> Tensor | None:
        """See `orders`."""
        return None if self.orders is None else self.orders[index]


def _take_ordered(tensor: QuantizedTensor, order: Tensor, columns: range) -> QuantizedTensor:
    """Some inputs of each group, in as large groups as there are, for a weight whose groups are of inputs anywhere."""
    places = ((order >= columns.start) & (order < columns.stop)).nonzero().flatten()
    group_of = places // tensor.group_size
    size = math.gcd(*torch.bincount(group_of).tolist())
    groups = group_of[::size]
    taken: dict[str, Any] = {
        name: part[:, groups]
        for name, part in (("scales", tensor.scales), ("offsets", tensor.offsets), ("zero_points", tensor.zero_points))
        if isinstance(part, Tensor)
    }
    # Neighbours may have been scaled together: each group takes what scales it along.
    for name, part in (("super_scales", tensor.super_scales), ("super_offsets", tensor.super_offsets)):
        if part is not None:
            taken[name] = part[:, groups // (tensor.num_groups // part.shape[1])]
    return replace(
        tensor,
        codes=tensor.plain_codes()[:, places],
        group_size=size,
        input_order=order[places] - columns.start,
        sparse=None if tensor.sparse is None else tensor.sparse.take_columns(columns.start, columns.stop),
        **taken,
    )
