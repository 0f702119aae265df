"""The folder of a store: segments of all models and engines, the least recently used ones going first."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.utils.file_locks import is_locked
from vllm.utils.kv_store.segment import (
    BLOCKS,
    INDEX,
    DamagedSegmentError,
    SegmentIndex,
    SegmentWriter,
    read_blocks,
)

logger = init_logger(__name__)

_LOCK = ".lock"
# The default bound, as a part of what is free or the store's.
_SHARE = 0.5
# So much of the disk stays free, whatever the bound: a tenth of it, or this, if that is less.
_KEPT_FREE_BYTES = 4 * 2**30
# A segment is what goes at once, and what a writer holds for itself.
_SEGMENTS_IN_BOUND, _LARGEST_SEGMENT = 16, 256 * 2**20


class Segment(NamedTuple):
    """A segment of the folder.

    Attributes:
        path: of its index.
        shelf: whose blocks it has.
        size: bytes on disk; of one that is being written, the most that there will be.
        used: when a block was last added or read, in seconds since 1970.
        is_written: whether its writer lives.
    """

    path: Path
    shelf: str
    size: int
    used: float
    is_written: bool


class StoreFolder:
    """The segments in a folder, which is made if it is not there. All is for the user alone: what belongs to another
    one is not read.

    Attributes:
        path: the folder's.
    """

    def __init__(self, path: Path, bound_gib: float | None = None) -> None:
        """`bound_gib`: of all segments together; None: half of the disk that is free or theirs."""
        self.path = path
        self._bound_gib = bound_gib

    def open(self) -> None:
        """Make the folder, if it is not there. OSError: it cannot be made, written to, or is another user's."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.path.stat().st_uid != os.geteuid():
            raise PermissionError(f"{self.path} belongs to another user")
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"{self.path} cannot be written to")

    def segments(self, shelf: str | None = None) -> list[Segment]:
        """Segments of a shelf, or all, from the one that was used last."""
        found = []
        for path in self.path.glob(f"{shelf or '*'}-*{INDEX}") if self.path.is_dir() else ():
            with contextlib.suppress(OSError):
                stat = path.stat()
                if stat.st_uid == os.geteuid():
                    found.append(self._segment(path, stat.st_size, stat.st_mtime))
        return sorted(found, key=lambda segment: -segment.used)

    @staticmethod
    def _segment(path: Path, size: int, used: float) -> Segment:
        is_written = is_locked(path)
        with contextlib.suppress(OSError):
            size += path.with_suffix(BLOCKS).stat().st_size
        if is_written:
            with contextlib.suppress(OSError, ValueError):
                size = max(size, SegmentIndex(path).capacity)
        return Segment(path, path.name.partition("-")[0], size, used, is_written)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Only one process adds or removes segments at a time."""
        file = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def begin_segment(self, shelf: str, about: dict[str, Any], least: int) -> SegmentWriter:
        """A new segment, with room for at least `least` bytes; others go for it. OSError: the bound or the disk does
        not have the room."""
        self.open()
        with self._locked():
            self._remove_left()
            others = self.segments()
            ours, bound = sum(each.size for each in others), self._bound(others)
            size = min(max(int(bound) // _SEGMENTS_IN_BOUND, least), max(_LARGEST_SEGMENT, least))
            if size > bound:
                raise OSError(f"a block takes more than {bound / 2**30:.3g} GiB, the bound of {self.path}")
            usage = shutil.disk_usage(self.path)
            free, kept = usage.free, min(usage.total // 10, _KEPT_FREE_BYTES)
            while ours + size > bound or free - size < kept:
                idle = [each for each in others if not each.is_written]
                if not idle:
                    raise OSError(
                        f"{self.path} has no room for further blocks: engines write to {ours / 2**30:.3g} GiB of "
                        f"{bound / 2**30:.3g}, and of {free / 2**30:.1f} GiB that are free {kept / 2**30:.1f} stay so"
                    )
                others.remove(idle[-1])
                self.remove(idle[-1].path)
                ours, free = ours - idle[-1].size, free + idle[-1].size
            return SegmentWriter(self._new_path(shelf), about, size)

    def _bound(self, segments: list[Segment]) -> float:
        if self._bound_gib is not None:
            return self._bound_gib * 2**30
        return _SHARE * (shutil.disk_usage(self.path).free + sum(each.size for each in segments))

    def _new_path(self, shelf: str) -> Path:
        # Names grow with time: of two blocks of one content the newer one is used.
        return self.path / f"{shelf}-{time.time_ns():016x}-{os.getpid()}{INDEX}"

    @staticmethod
    def remove(path: Path) -> None:
        """Remove a segment. Whoever reads it now reads on."""
        for file in (path, path.with_suffix(BLOCKS)):
            with contextlib.suppress(OSError):
                file.unlink()

    def clear(self) -> list[Segment]:
        """Remove all segments, also those that engines write to, which begin others."""
        self.path.stat()
        if not any(next(self.path.glob(f"*{suffix}"), None) for suffix in (INDEX, BLOCKS)):
            # It may be no store: then nothing is left there, either.
            return []
        with self._locked():
            found = self.segments()
            for segment in found:
                self.remove(segment.path)
            self._remove_left()
        return found

    def _remove_left(self) -> None:
        """Remove blocks without an index: a process was killed while it removed them."""
        for path in self.path.glob(f"*{BLOCKS}"):
            if not path.with_suffix(INDEX).exists():
                self.remove(path)

    def verify(self, segment: Segment) -> str | None:
        """Read a whole segment: its damage, in words; None: there is none. OSError: it cannot be read."""
        try:
            index = SegmentIndex(segment.path)
        except DamagedSegmentError as error:
            return str(error)
        entries = index.read_new()
        with index.blocks.open("rb", buffering=0) as file:
            for _, place in entries:
                if place is not None and not read_blocks([place], file.fileno()):
                    return (
                        f"{index.blocks.name} is damaged between bytes {place.start:,} and {place.start + place.size:,}"
                    )
        return None


def touch(path: Path) -> None:
    """Note that a segment is used now."""
    with contextlib.suppress(OSError):
        os.utime(path.with_suffix(INDEX))
