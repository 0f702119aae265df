"""Collectives between the processes of one machine, through shared memory.

gloo takes about a millisecond for the smallest sum, of which a small model's decode step has sixty, and its order of
summation depends on a value's place in the tensor. Here a rank writes its tensor into its slot, sends every other rank
a byte, and reads their slots once their bytes have arrived: some ten microseconds on free cores. Sums are added up in
the order of ranks, so their bits depend on nothing else.

Memory and sockets have no names, so nothing is left behind, and the end of a process is an error for those that wait.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.distributed.communicator import Communicator

_SLOT_BYTES = 1 << 20
# While a rank reads the slots of one exchange, another may have begun the next one, but not the one after.
_NUM_SLOTS = 2


@dataclass(frozen=True)
class Links:
    """One rank's file descriptors, which a child process may inherit: of the shared memory, and of the sockets to each
    rank, in order, -1 for this rank itself."""

    rank: int
    memory: int
    sockets: tuple[int, ...]

    @property
    def descriptors(self) -> list[int]:
        return [self.memory, *(each for each in self.sockets if each >= 0)]

    def close(self) -> None:
        """Close them: a process that kept those of another rank would not notice its end."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def make_links(world_size: int) -> list[Links]:
    """Links for ranks that are to be started."""
    with _unnamed_file() as memory:
        os.ftruncate(memory, world_size * _NUM_SLOTS * _SLOT_BYTES)
        sockets = [[-1] * world_size for _ in range(world_size)]
        for low, high in itertools.combinations(range(world_size), 2):
            for own, other, end in zip((low, high), (high, low), socket.socketpair(), strict=True):
                sockets[own][other] = end.detach()
        return [Links(rank, os.dup(memory), tuple(own)) for rank, own in enumerate(sockets)]


class SharedMemoryCommunicator(Communicator):
    """A Communicator of tensors on CPU, whose ranks are processes (or threads) of one machine. Takes `links` over."""

    def __init__(self, links: Links) -> None:
        super().__init__()
        self.rank, self.world_size = links.rank, len(links.sockets)
        self._sockets = [socket.socket(fileno=each) for each in links.sockets if each >= 0]
        size = self.world_size * _NUM_SLOTS * _SLOT_BYTES
        # uint8 [parity, rank, byte]
        memory = torch.frombuffer(mmap.mmap(links.memory, size), dtype=torch.uint8)
        self._slots = memory.view(_NUM_SLOTS, self.world_size, _SLOT_BYTES)
        self._parity = 0
        os.close(links.memory)

    def _all_reduce(self, tensor: Tensor) -> None:
        for _, piece in _pieces(tensor):
            first, second, *others = self._exchange(piece)
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)

    def _all_gather(self, gathered: Tensor, tensor: Tensor) -> None:
        self._gather(gathered, tensor, self.rank)

    def _gather(self, gathered: Tensor | None, tensor: Tensor, dst: int) -> None:
        for start, piece in _pieces(tensor):
            parts = self._exchange(piece)
            if gathered is not None:
                flat = gathered.view(self.world_size, -1)
                torch.stack(parts, out=flat[:, start : start + len(piece)])

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        for _, piece in _pieces(tensor):
            part = self._exchange(piece if self.rank == src else piece[:0], len(piece))[src]
            if self.rank != src:
                piece.copy_(part)

    def _exchange(self, piece: Tensor, length: int | None = None) -> list[Tensor]:
        """Write a flat tensor that fits a slot; returns every rank's, `length` values each, valid until the next
        exchange."""
        size = (len(piece) if length is None else length) * piece.element_size()
        slots = [slot[:size].view(piece.dtype) for slot in self._slots[self._parity].unbind()]
        slots[self.rank][: len(piece)] = piece
        self._parity = (self._parity + 1) % _NUM_SLOTS
        # Writes of a process before it sent are visible to those that have received.
        for each in self._sockets:
            each.send(b"\0")
        for each in self._sockets:
            if not each.recv(1):
                raise ConnectionError("a process of the group has ended")
        return slots


def _pieces(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A contiguous tensor as flat pieces that fit a slot, each with the number of values before it."""
    length = _SLOT_BYTES // tensor.element_size()
    for index, piece in enumerate(tensor.view(-1).split(length)):
        yield index * length, piece


@contextlib.contextmanager
def _unnamed_file() -> Iterator[int]:
    """Descriptor of a file in memory, or, where the system has none, of one without a name."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            yield file.fileno()
        return
    descriptor = os.memfd_create("vllm-ranks")
    try:
        yield descriptor
    finally:
        os.close(descriptor)
