"""Which part of a checkpoint's tensor a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vllm.distributed.communicator import Communicator


@dataclass(frozen=True)
class Shard:
    """Of `size` rows (or columns) of a whole tensor, those in `held`."""

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
    """Where a checkpoint's tensor goes."""

    target: Tensor  # the (part of a) parameter to fill
    shards: tuple[Shard, ...]  # what it holds of each of the tensor's dimensions
    prepare: Callable[[Tensor], Tensor] | None = None  # of the whole tensor, into one of the same shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return tuple(shard.size for shard in self.shards)

    def fill(self, tensor: Tensor) -> None:
        """Copy the held part of the whole `tensor`, converting it. Only that part of a mapped file is read, unless
        the tensor is prepared."""
        if self.prepare is not None:
            tensor = self.prepare(tensor)
        self.target.copy_(tensor[tuple(slice(shard.held.start, shard.held.stop) for shard in self.shards)])
