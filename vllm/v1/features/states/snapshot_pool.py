"""Copies of requests' states at borders of blocks, by the content before them."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain

from vllm.v1.request import Request


class SnapshotPool:
    """Snapshots 0 .. num_snapshots - 1 by content hash; the least recently used one is evicted first.

    A step loads states from snapshots before its forward pass and saves others after it. So what a step saves is found
    by the next one, and one of its snapshots is not saved to twice. States from elsewhere are placed before any is
    loaded, so never where the step loads another one from.
    """

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._unused = list(range(num_snapshots - 1, -1, -1))  # a stack: memory that was never touched comes last
        self._snapshot_of: OrderedDict[bytes, int] = OrderedDict()  # oldest use first
        self._saved: dict[bytes, tuple[int, Request]] = {}  # by the step being scheduled: the snapshot and whose state
        self._loaded: set[int] = set()  # by the step being scheduled

    def __len__(self) -> int:
        return len(self._snapshot_of) + len(self._saved)

    @property
    def usage(self) -> float:
        """Share of the snapshots that hold content, in [0, 1]."""
        return len(self) / self.num_snapshots

    def find(self, content_hash: bytes) -> int | None:
        """The snapshot of the state after this content, if there is one to load."""
        return self._snapshot_of.get(content_hash)

    def use(self, content_hash: bytes) -> None:
        """The step being scheduled loads it."""
        self._snapshot_of.move_to_end(content_hash)
        self._loaded.add(self._snapshot_of[content_hash])

    @property
    def can_place(self) -> bool:
        """Whether `place` finds a snapshot."""
        return self._placeable() is not None

    def _placeable(self) -> int | None:
        candidates = chain(reversed(self._unused), self._snapshot_of.values())
        return next((each for each in candidates if each not in self._loaded), None)

    def place(self, content_hash: bytes) -> int:
        """The snapshot to fill with the state after this content, which is elsewhere, before the step loads any."""
        snapshot = self._placeable()
        assert snapshot is not None, "the step loads all snapshots"
        if snapshot not in self._unused:
            self.forget_snapshots({snapshot})
        self._unused.remove(snapshot)
        self._snapshot_of[content_hash] = snapshot
        return snapshot

    def saver(self, content_hash: bytes) -> Request | None:
        """The request whose state the step saves after this content, if any."""
        saved = self._saved.get(content_hash)
        return None if saved is None else saved[1]

    def save(self, content_hash: bytes, request: Request) -> int | None:
        """The snapshot to save the request's state to after the step; None: there is one, or the step uses all."""
        if content_hash in self._snapshot_of or content_hash in self._saved:
            return None
        if self._unused:
            snapshot = self._unused.pop()
        elif self._snapshot_of:
            snapshot = self._snapshot_of.popitem(last=False)[1]
        else:
            return None
        self._saved[content_hash] = snapshot, request
        return snapshot

    def drop_saved(self, request: Request) -> list[int]:
        """The request leaves the step being scheduled: the snapshots that it was to fill."""
        dropped = [(key, snapshot) for key, (snapshot, owner) in self._saved.items() if owner is request]
        for key, snapshot in dropped:
            del self._saved[key]
            self._unused.append(snapshot)
        return [snapshot for _, snapshot in dropped]

    def end_step(self) -> None:
        """The step is scheduled: the next one may load what it saves."""
        for key, (snapshot, _) in self._saved.items():
            self._snapshot_of[key] = snapshot
        self._saved.clear()
        self._loaded.clear()

    def forget(self, content_hash: bytes) -> None:
        """Discard the snapshot after this content, if there is one."""
        snapshot = self._snapshot_of.pop(content_hash, None)
        if snapshot is not None:
            self._unused.append(snapshot)

    def forget_snapshots(self, snapshots: set[int]) -> None:
        """Discard what these hold."""
        for key in [key for key, snapshot in self._snapshot_of.items() if snapshot in snapshots]:
            self.forget(key)

    def reset(self) -> None:
        """Discard all."""
        for content_hash in list(self._snapshot_of):
            self.forget(content_hash)
