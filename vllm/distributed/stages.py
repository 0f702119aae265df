"""Stages of a model that is split by layers: one link between a stage and the next carries the rows between them."""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from vllm.distributed.communicator import Communicator, PeerLostError
from vllm.distributed.process_group import JOIN_TIMEOUT

# Decoding computes all of the head in each step, and scoring, which takes longer, almost nothing of it.
_HEAD_SHARE = 0.25
_KEY_BYTES = 16
_KEY_SECONDS = 10.0


@dataclass(frozen=True)
class StageEnds:
    """The place of a process among the stages of a model, and file descriptors of its sockets to the neighbours, which
    a child process may inherit; -1: there is none."""

    index: int = 0
    size: int = 1
    previous: int = -1
    next: int = -1
    rooms: tuple[float, ...] = ()  # bytes of memory that a rank of each stage may take; (): all have what they need

    @property
    def are_elsewhere(self) -> bool:
        """Whether there are neighbours to which there is no connection yet: see `connect_ends`."""
        return self.size > 1 and not self.descriptors

    @property
    def descriptors(self) -> list[int]:
        return [each for each in (self.previous, self.next) if each >= 0]

    def close(self) -> None:
        """Close them: a process that kept those of another would not notice its end."""
        for descriptor in self.descriptors:
            os.close(descriptor)


ONLY = StageEnds()
"""A model that is not split by layers."""


def make_ends(size: int) -> list[StageEnds]:
    """Ends for the processes of `size` stages on one machine, in their order; each socket is to be taken over by a
    `Stage`, here or in a child."""
    pairs = [socket.socketpair() for _ in range(size - 1)]
    left = [-1, *(theirs.detach() for _, theirs in pairs)]
    right = [*(own.detach() for own, _ in pairs), -1]
    return [StageEnds(index, size, left[index], right[index]) for index in range(size)]


def connect_ends(ends: StageEnds, store: dist.Store, number: int, address: str) -> StageEnds:
    """`ends` with TCP connections to the neighbours, whose ranks of this number make the same call.

    Args:
        store: shared by all ranks of all stages.
        number: of the rank in its stage.
        address: this machine's, where the stage before connects.

    Raises:
        OSError: a neighbour cannot be reached, or does not come.
    """
    before = after = -1
    with contextlib.ExitStack() as stack:
        if ends.index > 0:
            server = stack.enter_context(socket.create_server((address, 0)))
            server.settimeout(JOIN_TIMEOUT.total_seconds())
            key = secrets.token_hex(_KEY_BYTES)
            store.set(f"link/{ends.index}/{number}", f"{address} {server.getsockname()[1]} {key}")
        if ends.index < ends.size - 1:
            host, port, their_key = store.get(f"link/{ends.index + 1}/{number}").decode().split()
            link = socket.create_connection((host, int(port)), JOIN_TIMEOUT.total_seconds())
            link.sendall(their_key.encode())
            after = _lasting(link)
        while ends.index > 0 and before < 0:
            link, _ = server.accept()
            # Any process may connect; one that sends nothing must not keep the stage from coming.
            link.settimeout(_KEY_SECONDS)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(link.recv(len(key), socket.MSG_WAITALL), key.encode()):
                    before = _lasting(link)
                    continue
            link.close()
    return replace(ends, previous=before, next=after)


def _lasting(link: socket.socket) -> int:
    """The descriptor of a connection that waits for as long as its peer computes."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link.detach()


class Stage:
    """A process's stage: it receives rows from the stage before and sends those that it makes to the next. Takes the
    sockets of `ends` over.

    Attributes:
        index, size: which stage this is, in [0, size).
        rooms: see StageEnds.
        group: counts bytes and calls, as "receive" and "send", and says when this process waits.
        layers: of the model, that are this stage's; None: all are, or they have not been shared out yet.
        embeds: whether it has the embedding, the first stage for its tokens, another one for drafts.
    """

    def __init__(self, ends: StageEnds = ONLY, group: Communicator | None = None) -> None:
        self.index, self.size, self.rooms = ends.index, ends.size, ends.rooms
        self.layers: range | None = None
        self.embeds = self.is_first
        self.group = Communicator() if group is None else group
        self._sockets = [None if each < 0 else socket.socket(fileno=each) for each in (ends.previous, ends.next)]
        # Bytes that the socket does not take at once leave while the next step is computed.
        self._outgoing: queue.Queue[bytes | None] = queue.Queue()
        if self._sockets[1] is not None:
            threading.Thread(target=self._send_all, args=(self._sockets[1],), daemon=True).start()

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head, samples and reads."""
        return self.index == self.size - 1

    @property
    def part(self) -> tuple[int, int, bool, bool] | None:
        """The part of the model that is here: its layers, and whether it has the embedding and the head; None: all."""
        return None if self.layers is None else (self.layers.start, self.layers.stop, self.embeds, self.is_last)

    def receive(self, rows: Tensor) -> Tensor:
        """Fill `rows`, contiguous, with those that the stage before has sent; returns it.

        Raises:
            PeerLostError: that stage has gone.
        """
        (source, _) = self._sockets
        assert source is not None, "the first stage receives nothing"
        self.group.num_bytes["receive"] += rows.nbytes
        self.group.num_calls["receive"] += 1
        self.group.is_waiting = True
        try:
            left = _bytes_of(rows)
            while left:
                count = source.recv_into(left)
                if not count:
                    raise ConnectionError("it has ended")
                left = left[count:]
        except OSError as error:
            raise PeerLostError(f"stage {self.index} lost stage {self.index - 1}: {error}") from error
        finally:
            self.group.is_waiting = False
        return rows

    def send(self, rows: Tensor) -> None:
        """Send `rows`, contiguous, to the next stage, without waiting for it; they may change afterwards."""
        (_, target) = self._sockets
        assert target is not None, "the last stage sends nothing"
        self.group.num_bytes["send"] += rows.nbytes
        self.group.num_calls["send"] += 1
        left = _bytes_of(rows)
        if not self._outgoing.unfinished_tasks:
            # An error here is one of the next stage, whose end the executor notices.
            with contextlib.suppress(OSError):
                left = left[target.send(left, socket.MSG_DONTWAIT) :]
        if left:
            self._outgoing.put(bytes(left))

    def disconnect(self) -> None:
        """Let go of the neighbours, from any thread: what waits for them fails."""
        self._outgoing.put(None)
        for each in self._sockets:
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the links."""
        self.disconnect()
        for each in self._sockets:
            if each is not None:
                each.close()

    def _send_all(self, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := self._outgoing.get()) is not None:
                target.sendall(data)
                self._outgoing.task_done()


def _bytes_of(rows: Tensor) -> memoryview:
    return memoryview(rows.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


WHOLE = Stage()
"""All of a model."""

_stage: ContextVar[Stage] = ContextVar("stage", default=WHOLE)


def get_stage() -> Stage:
    """The stage whose part of a model is being built; `WHOLE` outside `building_stage`."""
    return _stage.get()


@contextmanager
def building_stage(stage: Stage) -> Iterator[None]:
    """Build a stage's part of a model within."""
    token = _stage.set(stage)
    try:
        yield
    finally:
        _stage.reset(token)


@dataclass(frozen=True)
class ModelSizes:
    """Bytes of a model's parts, on a rank of a stage."""

    layers: Sequence[int]  # the weights of each layer
    caches: Sequence[int]  # each layer's keys and values of the longest request
    embedding: int
    head: int
    num_of_first: int = 0  # layers, at the beginning, that the first stage must have


def split_layers(sizes: ModelSizes, size: int, rooms: Sequence[float] = ()) -> list[range]:
    """The layers of each of `size` stages, consecutive and at least one a stage, so that all stages have room for what
    is theirs and the slowest one is as fast as it can be. A stage takes the time of its weights, for which the head
    counts in part and the embedding, which is looked up, not at all.

    Args:
        rooms: bytes of memory of each stage; (): there is enough. Where no split fits, the fullest stage is as little
            too full as it can be.

    Raises:
        ValueError: there are more stages than layers, or than those that can be apart.
    """
    count, least = len(sizes.layers), max(sizes.num_of_first, 1)
    if size > count:
        raise ValueError(f"pipeline_parallel_size={size} exceeds the model's {count} layers")
    if size - 1 > count - least:
        raise ValueError(f"pipeline_parallel_size={size}: the first {least} of the model's {count} layers go together")
    weights, caches = [0, *accumulate(sizes.layers)], [0, *accumulate(sizes.caches)]

    def load(stage: int, begin: int, end: int) -> tuple[float, float]:
        """How full a stage is, if it is too full, and its time."""
        own, head = weights[end] - weights[begin], sizes.head if stage == size - 1 else 0
        needed = own + caches[end] - caches[begin] + head + (0 if stage else sizes.embedding)
        return max(needed / rooms[stage], 1.0) if rooms else 1.0, own + _HEAD_SHARE * head

    # best[end]: the highest loads, and the bounds, of the stages so far with layers before `end`.
    best = {end: (load(0, 0, end), [0, end]) for end in range(least, count + 1)}
    for stage in range(1, size):
        best = {
            end: min(
                (_highest(highest, load(stage, begin, end)), [*bounds, end])
                for begin, (highest, bounds) in best.items()
                if begin < end
            )
            for end in range(least + stage, count + 1)
        }
    return [range(*bounds) for bounds in pairwise(best[count][1])]


def _highest(load: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return max(load[0], other[0]), max(load[1], other[1])


def layers_as_asked(counts: Sequence[int], num_layers: int, size: int) -> list[range]:
    """The layers of each stage by their numbers.

    Raises:
        ValueError: there are not `size` numbers, or they do not add up to the model's layers.
    """
    if len(counts) != size or sum(counts) != num_layers:
        shown = ",".join(map(str, counts))
        raise ValueError(
            f"VLLM_PP_LAYER_PARTITION must have pipeline_parallel_size={size} numbers that add up to the model's "
            f"{num_layers} layers, got {shown}"
        )
    return [range(*bounds) for bounds in pairwise([0, *accumulate(counts)])]
