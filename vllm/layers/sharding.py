"""Which part of a checkpoint's tensor a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.distributed.communicator import Communicator
from vllm.logger import init_logger
from vllm.quantization.activations import InputQuantization
from vllm.quantization.weight import QuantizedStack, QuantizedWeight

logger = init_logger(__name__)


@dataclass(frozen=True)
class Shard:
    """The rows (or columns) in `held` of the `size` that a whole tensor has."""

    size: int
    held: range

    @classmethod
    def whole(cls, size: int) -> Shard:
        return cls(size, range(size))

    @classmethod
    def even(cls, size: int, group: Communicator) -> Shard:
        """The rank's of N equal parts. N divides `size`: VllmConfig checks it."""
        share, rest = divmod(size, group.world_size)
        assert not rest, f"{size} rows for {group.world_size} ranks"
        return cls(size, range(group.rank * share, (group.rank + 1) * share))


@dataclass(frozen=True)
class WeightSlot:
    """The place of a checkpoint's tensor in a parameter."""

    is_elsewhere: ClassVar[bool] = False
    """Whether another stage has the parameter."""

    target: Tensor  # the (part of a) parameter to fill
    shards: tuple[Shard, ...]  # what it holds of each of the tensor's dimensions
    prepare: Callable[[Tensor], Tensor] | None = None  # of the whole tensor, into one of the same shape
    keep: Callable[[QuantizedWeight], None] | None = None  # takes the held part of a quantised weight
    keep_stack: Callable[[QuantizedStack], None] | None = None  # the same for a stack, of which it gets all
    place: Callable[[], Tensor] | None = None  # `target`, in memory, where that may be on the meta device
    leave: Callable[[Tensor], bool] | None = None  # offered the held part: whether it is not to be copied
    may_lack: bool = False  # the checkpoint may have none: `target` stays as it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(shard.size for shard in self.shards)

    def fill(self, value: Tensor | QuantizedWeight | QuantizedStack) -> None:
        """Copy the held part of the whole tensor, converting it, unless the slot leaves it where it is. Only that part
        of a mapped file is read, unless the tensor is prepared. A quantised weight's part is kept as it is, or
        de-quantised where the layer has plain ones only. ValueError: it is a stack, and the layer cannot have that."""
        if isinstance(value, QuantizedStack):
            if self.keep_stack is None:
                raise ValueError(f"{value.source}: a weight of this layer cannot be a quantised stack")
            self.keep_stack(value)
            return
        if isinstance(value, QuantizedWeight) and self.keep is None:
            value = self._plain(value)
        if isinstance(value, QuantizedWeight):
            self._keep(value)
            return
        held = self._held(value)
        if self.leave is not None and self.leave(held):
            return
        target = self.target if self.place is None else self.place()
        target.copy_(held)

    def _held(self, tensor: Tensor) -> Tensor:
        if self.prepare is not None:
            tensor = self.prepare(tensor)
        return tensor[tuple(slice(shard.held.start, shard.held.stop) for shard in self.shards)]

    @staticmethod
    def _plain(value: QuantizedWeight) -> Tensor:
        if value.tensor.is_plain:
            return value.tensor.plain_codes()
        if isinstance(value.inputs, InputQuantization):
            raise ValueError(
                f"{value.source}: its layer multiplies with plain weights, and inputs are not rounded for these: unset "
                "VLLM_QUANTIZED_ACTIVATIONS"
            )
        logger.warning("%s is de-quantised: its layer multiplies with plain weights", value.source)
        return value.dequantize()

    def _keep(self, value: QuantizedWeight) -> None:
        assert self.keep is not None
        held, inputs = self.shards
        if self.prepare is not None or len(held.held) < held.size:
            rows = torch.arange(held.size)
            if self.prepare is not None:
                rows = self.prepare(rows)
            value = value.take_rows(rows[held.held.start : held.held.stop])
        self.keep(value.take_columns(inputs.held))


def parameter_slots(
    name: str, parameter: nn.Parameter, parts: dict[str, Shard], inputs: Shard
) -> dict[str, WeightSlot]:
    """Where the tensors `part.name` of a checkpoint go, for a layer that stacks `parts` and takes `inputs`.

    A parameter's `output_dim` and `input_dim`, where it has these, are the dimensions that follow the layer's outputs
    and inputs, each for one or several of them. Without `output_dim`, a parameter of a layer with several parts has an
    element for each.

    Raises:
        ValueError: its shape does not follow the layer's, or it has a `weight_loader`, which is not called.
    """
    if getattr(parameter, "weight_loader", None) is not None:
        raise ValueError(f"weight_loader of parameter {name} is not called: set input_dim and output_dim in its place")
    output_dim, input_dim = getattr(parameter, "output_dim", None), getattr(parameter, "input_dim", None)
    shards = [Shard.whole(size) for size in parameter.shape]
    if input_dim is not None:
        shards[input_dim] = _scaled(name, inputs, parameter.shape[input_dim], len(inputs.held))
    total = sum(len(rows.held) for rows in parts.values())
    slots = {}
    start = 0
    for index, (part, rows) in enumerate(parts.items()):
        own = list(shards)
        target: Tensor = parameter.data
        if output_dim is not None:
            own[output_dim] = _scaled(name, rows, parameter.shape[output_dim], total)
            count = len(own[output_dim].held)
            target = parameter.data.narrow(output_dim, start, count)
            start += count
        elif len(parts) > 1:
            if not own or own[0].size != len(parts):
                raise ValueError(
                    f"parameter {name} of a layer with {len(parts)} parts must have an output_dim, or an element for "
                    f"each part; its shape is {tuple(parameter.shape)}"
                )
            own[0] = Shard.whole(1)
            target = parameter.data[index : index + 1]
        slots[f"{part}.{name}"] = WeightSlot(target, tuple(own))
    return slots


def _scaled(name: str, shard: Shard, size: int, layer_size: int) -> Shard:
    """`shard` of a layer's size, for a parameter of `size` there."""
    ratio = Fraction(size, layer_size)
    ends = [ratio * end for end in (shard.size, shard.held.start, shard.held.stop)]
    if any(end.denominator != 1 for end in ends):
        raise ValueError(f"parameter {name} has size {size}, which does not follow the layer's {layer_size}")
    whole, start, stop = map(int, ends)
    return Shard(whole, range(start, stop))
