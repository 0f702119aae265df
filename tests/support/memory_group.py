"""N ranks as threads whose collectives are copies in memory: quick, and strict about who calls what."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from vllm.distributed.communicator import Communicator

T = TypeVar("T")


class _Meeting:
    """Where the ranks put what they hand over; a rank that fails lets the others fail, too, instead of waiting."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.given: list[tuple[str, Tensor] | None] = [None] * world_size


class MemoryCommunicator(Communicator):
    """The collectives of Communicator, over memory. Ranks that do not make the same call, with tensors of one shape
    and dtype, fail."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world_size = world_size
        self.num_bytes = Counter()
        self.num_calls = Counter()
        self._meeting = meeting

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_reduce", tensor)).sum(dim=0).to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_gather", tensor))

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor | None:
        given = self._exchange("gather", tensor)
        return torch.stack(given) if self.rank == dst else None

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return tensor.copy_(self._exchange("broadcast", tensor)[src])

    def _exchange(self, collective: str, tensor: Tensor) -> list[Tensor]:
        self.num_bytes[collective] += tensor.numel() * tensor.element_size()
        self.num_calls[collective] += 1
        meeting = self._meeting
        meeting.given[self.rank] = (collective, tensor.clone())
        meeting.barrier.wait()
        given = [each for each in meeting.given if each is not None]
        kinds = {(name, tuple(part.shape), part.dtype) for name, part in given}
        assert len(kinds) == 1, f"ranks call different collectives: {kinds}"
        meeting.barrier.wait()  # until all have looked
        return [part for _, part in given]


def run_ranks(world_size: int, run: Callable[[Communicator], T]) -> list[T]:
    """Call `run` for each rank of a group, all at a time; their results."""
    meeting = _Meeting(world_size)

    def one(rank: int) -> T:
        try:
            return run(MemoryCommunicator(rank, world_size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(world_size)]
    errors = [future.exception() for future in futures]
    for error in errors:
        # The others' barriers broke because of the first one.
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
