"""Collectives over torch.distributed, with a count of what they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d


class PeerLostError(RuntimeError):
    """A collective failed, because another rank has gone or the ranks do not agree."""


class Communicator:
    """The ranks that share one model. Every rank makes the same calls in the same order; each may raise PeerLostError.

    A group of one rank moves nothing and needs no torch.distributed: `Communicator()`. Other ones take a process group
    or a backend of torch.distributed, of which this process is a member.

    Attributes:
        rank: this process, in [0, world_size).
        world_size: N, the number of ranks.
        num_bytes: by collective ("all_reduce", "all_gather", "gather", "broadcast"), the bytes of the tensors that this
            rank put in.
        num_calls: by collective, how often it was begun.
        is_waiting: this process is in a collective, or waits for its device, and so may wait for other ranks.
        waits_for_device: it is the device that it waits for, which may as well be computing.
    """

    def __init__(self, group: Any = None) -> None:
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self._group = group
        self.num_bytes: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self.is_waiting = self.waits_for_device = False

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """While the host waits for the device, where a collective may be in progress."""
        self.is_waiting = self.waits_for_device = True
        try:
            yield
        finally:
            self.is_waiting = self.waits_for_device = False

    def abort(self) -> None:
        """End the collectives in progress on this rank's device, from any thread: ranks that wait for them go on, with
        results that mean nothing. Later collectives fail. For NCCL; see `disconnect` for gloo's."""
        group = self._group
        if group is not None and group.name() == "nccl":
            group.abort()

    def disconnect(self) -> None:
        """Close gloo's connections to the other ranks, from any thread: collectives in progress fail, and later ones.
        They end by themselves when the other ranks do, but not when those cannot be reached."""

    def close(self) -> None:
        """Leave the group: its threads end before the process does."""
        self.abort()
        self._group = None

    @property
    def device_group(self) -> Any:
        """The process group or backend that it was made of; None for a group of one rank."""
        return self._group

    @property
    def total_calls(self) -> int:
        """Collectives begun, of any kind. May be read by another thread."""
        return sum(dict(self.num_calls).values())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place where `tensor` is contiguous; returns the sum."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        with self._collective("all_reduce", tensor):
            self._all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Each rank's tensor of one shape and dtype, as [N, *shape] in the order of ranks, on every rank."""
        if self.world_size == 1:
            return tensor[None]
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        with self._collective("all_gather", tensor):
            self._all_gather(gathered, tensor.contiguous())
        return gathered

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor | None:
        """As all_gather, on rank `dst` alone; None elsewhere."""
        if self.world_size == 1:
            return tensor[None]
        gathered = tensor.new_empty((self.world_size, *tensor.shape)) if self.rank == dst else None
        with self._collective("gather", tensor):
            self._gather(gathered, tensor.contiguous(), dst)
        return gathered

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Rank `src`'s tensor, into a contiguous `tensor` of the same shape and dtype on the others."""
        if self.world_size == 1:
            return tensor
        with self._collective("broadcast", tensor):
            self._broadcast(tensor, src)
        return tensor

    @contextmanager
    def _collective(self, name: str, tensor: Tensor) -> Iterator[None]:
        """Count a collective and run it. On CUDA it is queued, and the current stream waits for it."""
        self.num_bytes[name] += tensor.numel() * tensor.element_size()
        self.num_calls[name] += 1
        self.is_waiting = True
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise PeerLostError(f"rank {self.rank} lost the others: {error}") from error
        finally:
            self.is_waiting = False

    @property
    def _runs_on_device(self) -> bool:
        return self._group.name() == "nccl"

    def _options(self, kind: Callable[[], Any]) -> Any:
        """On a device a collective runs on the current stream: no events to wait for another one, and a graph that is
        captured there holds it."""
        options = kind()
        if self._runs_on_device:
            options.asyncOp = False
        return options

    def count_again(self, num_calls: Mapping[str, int], num_bytes: Mapping[str, int]) -> None:
        """Count collectives that a graph repeats."""
        self.num_calls.update(num_calls)
        self.num_bytes.update(num_bytes)

    # On contiguous tensors; for subclasses to override.

    def _all_reduce(self, tensor: Tensor) -> None:
        self._group.allreduce([tensor], self._options(_distributed_c10d.AllreduceOptions)).wait()

    def _all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        options = self._options(_distributed_c10d.AllgatherOptions)
        if self._runs_on_device:
            # Without a copy of each part.
            self._group._allgather_base(gathered, tensor, options).wait()
        else:
            self._group.allgather([list(gathered.unbind(0))], [tensor], options).wait()

    def _gather(self, gathered: Tensor | None, tensor: Tensor, dst: int) -> None:
        options = self._options(_distributed_c10d.GatherOptions)
        options.rootRank = dst
        parts = [] if gathered is None else [list(gathered.unbind(0))]
        self._group.gather(parts, [tensor], options).wait()

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        options = self._options(_distributed_c10d.BroadcastOptions)
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


def split_vocab(vocab_size: int, world_size: int) -> list[range]:
    """The token ids of each rank: N contiguous ranges that cover [0, vocab_size), sizes differing by 1 at most."""
    bounds = [vocab_size * rank // world_size for rank in range(world_size + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


def split_kv_heads(num_kv_heads: int, world_size: int) -> list[range]:
    """The key/value heads of each rank: an N-th of them, or, with more ranks than heads, the one that the rank's query
    heads belong to."""
    return [
        range(num_kv_heads * rank // world_size, -(-num_kv_heads * (rank + 1) // world_size))
        for rank in range(world_size)
    ]


ALONE = Communicator()
"""A group of one rank."""
