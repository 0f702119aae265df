"""Streams of the pretended CUDA device, of which each may be far behind the others and the host.

All is computed at once, in the order in which the host asks for it. So that a program does not pass by that order
alone, whoever may see what another one does must have waited for it:

- an operation that reads or writes memory which another stream writes, or writes what another one reads, is an error
  unless its stream waits for the other one;
- so is giving memory back, while a stream uses it that the stream which it was made on does not wait for;
- what is copied to pinned memory is not there until the host waits, and what is copied from it must not have been
  changed by then.

Memory is told apart by storages. Time is a vector clock: of each stream how many operations it has been given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Clock = dict[int, int]
"""How many of a stream's operations are done, by the stream's number."""

# Instead of what has not come yet; no token, and no logprob.
_POISON = 127


class StreamRace(AssertionError):
    """The device's results depend on which stream is faster."""


@dataclass
class _Uses:
    """Who uses a storage: the stream that made it (none: it is a graph's), those that record_stream() was told of, the
    last write, and the reads since."""

    maker: int | None
    recorded: set[int] = field(default_factory=set)
    num_tensors: int = 0
    writes: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)


@dataclass
class _Transfer:
    """Between pinned memory and the device, by a stream at a time; `settle` is called when it is known to be done."""

    storage: int
    done: Clock
    settle: Callable[[], object]


class Streams:
    """The operations that streams have been given, and how far each is known to be."""

    def __init__(self) -> None:
        self.current = 0
        self._known: list[Clock] = [{}]  # by stream: what it has waited for, itself included
        self._host: Clock = {}
        self._uses: dict[int, _Uses] = {}
        self._transfers: list[_Transfer] = []
        self._races: list[str] = []  # that could not be told of at once
        self._is_told = False

    def new(self) -> int:
        """Another stream's number."""
        self._known.append({})
        return len(self._known) - 1

    def wait(self, stream: int, for_stream: int) -> None:
        """The stream does what comes next after all that the other one has been given."""
        _join(self._known[stream], self._known[for_stream])

    def reached(self) -> Clock:
        """The operations that are done once the current stream has done all that it was given."""
        return dict(self._known[self.current])

    def host_waits(self, *clocks: Clock) -> None:
        """The host waits until these are done; without any, until all is."""
        for clock in clocks or self._known:
            _join(self._host, clock)
        self._settle(lambda transfer: _covers(self._host, transfer.done))
        self.raise_races()

    def hold(self, tensor: Tensor, owner: Any, of_graph: bool) -> None:
        """The device's memory of `tensor` is in use as long as `owner` is there, or the graph that made it."""
        key = key_of(tensor)
        self._uses.setdefault(key, _Uses(None if of_graph else self.current)).num_tensors += 1
        weakref.finalize(owner, self._let_go, key).atexit = False

    def record(self, tensor: Tensor, stream: int) -> None:
        """Memory of `tensor` that is given back is used again only when this stream has done what it has been given."""
        self._uses[key_of(tensor)].recorded.add(stream)

    def use(self, reads: Iterable[int], writes: Iterable[int]) -> Clock:
        """Give the current stream an operation on these storages; returns when it is done."""
        own = self._known[self.current]
        _join(own, self._host)
        own[self.current] = own.get(self.current, 0) + 1
        done = {self.current: own[self.current]}
        for key in reads:
            if uses := self._uses.get(key):
                self._check(own, uses.writes, "reads what stream {} may still write")
                _join(uses.reads, done)
        for key in writes:
            if uses := self._uses.get(key):
                self._check(own, uses.writes, "writes what stream {} may still write")
                self._check(own, uses.reads, "writes what stream {} may still read")
                uses.writes, uses.reads = dict(done), {}
        self.raise_races()
        return done

    def copy_to_host(self, target: Tensor, source: Tensor, done: Clock) -> None:
        """Into pinned memory, where the host finds it when it has waited."""
        value = source.to(target.dtype, copy=True)
        self.deliver(target)
        target.fill_(_POISON)
        self._transfers.append(_Transfer(key_of(target), done, lambda: target.copy_(value)))

    def copy_from_host(self, source: Tensor, done: Clock) -> None:
        """From pinned memory, which is to stay as it is until then."""
        value = source.clone()

        def settle() -> None:
            if not torch.equal(_bytes(source), _bytes(value)):
                self._races.append("pinned memory was changed before it was copied to the device")

        self._transfers.append(_Transfer(key_of(source), done, settle))

    def deliver(self, pinned: Tensor) -> None:
        """Note that a copy there is complete, for streams that know of it."""
        own = _joined(self._host, self._known[self.current])
        self._settle(lambda transfer: transfer.storage == key_of(pinned) and _covers(own, transfer.done))

    def finish(self) -> None:
        """The program ends. Of what comes after a first race nothing more is said."""
        if not self._is_told:
            self.host_waits()

    def raise_races(self) -> None:
        """Raise StreamRace if there was one that could not be told of at once."""
        if self._races:
            races, self._races = self._races, []
            self._raise("; ".join(races))

    def _raise(self, race: str) -> None:
        self._is_told = True
        raise StreamRace(race)

    @torch.inference_mode()
    def _settle(self, is_done: Callable[[_Transfer], bool]) -> None:
        done = [transfer for transfer in self._transfers if is_done(transfer)]
        self._transfers = [transfer for transfer in self._transfers if not is_done(transfer)]
        for transfer in done:
            transfer.settle()

    def _check(self, own: Clock, others: Clock, what: str) -> None:
        for stream, time in others.items():
            if own.get(stream, 0) < time:
                self._raise(f"stream {self.current} {what.format(stream)}")

    def _let_go(self, key: int) -> None:
        uses = self._uses[key]
        uses.num_tensors -= 1
        if uses.num_tensors:
            return
        del self._uses[key]
        if uses.maker is None:
            return
        known = _joined(self._host, self._known[uses.maker])
        for stream, time in _joined(uses.reads, uses.writes).items():
            if stream not in uses.recorded and known.get(stream, 0) < time:
                self._races.append(f"memory of stream {uses.maker} was given back while stream {stream} may use it")


def key_of(tensor: Tensor) -> int:
    """The storage's key, as long as it is there."""
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> Tensor:
    """So that NaN equals itself."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


def _joined(clock: Clock, other: Clock) -> Clock:
    both = dict(clock)
    _join(both, other)
    return both


def _covers(clock: Clock, other: Clock) -> bool:
    return all(clock.get(stream, 0) >= time for stream, time in other.items())
