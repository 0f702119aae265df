"""Which part of a checkpoint's tensor a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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

    target: Tensor  # the (part of a) parameter to fill
    shards: tuple[Shard, ...]  # what it holds of each of the tensor's dimensions
    prepare: Callable[[Tensor], Tensor] | None = None  # of the whole tensor, into one of the same shape
    keep: Callable[[QuantizedWeight], None] | None = None  # takes the held part of a quantised weight
    keep_stack: Callable[[QuantizedStack], None] | None = None  # the same for a stack, of which it gets all
    place: Callable[[], Tensor] | None = None  # `target`, in memory, where that may be on the meta device
    may_lack: bool = False  # the checkpoint may have none: `target` stays as it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(shard.size for shard in self.shards)

    def fill(self, value: Tensor | QuantizedWeight | QuantizedStack) -> None:
        """Copy the held part of the whole tensor, converting it. Only that part of a mapped file is read, unless the
        tensor is prepared. A quantised weight's part is kept as it is, or de-quantised where the layer has plain ones
        only. ValueError: it is a stack, and the layer cannot have that."""
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
        target = self.target if self.place is None else self.place()
        target.copy_(self._held(value))

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
