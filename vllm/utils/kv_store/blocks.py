"""The blocks of one model in a store: found by content, read with their checksums, and written beside the caller."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from vllm.logger import init_logger, warn_once
from vllm.utils.kv_store.folder import StoreFolder, touch
from vllm.utils.kv_store.segment import (
    ENTRY_BYTES,
    Bytes,
    Checksums,
    NewBlock,
    Place,
    SegmentIndex,
    SegmentWriter,
    checksums,
    read_blocks,
)

logger = init_logger(__name__)

MOST_UNWRITTEN_BYTES = 256 * 2**20
"""The most that waits to be written: blocks beyond it are not kept."""
# The most that the index gets at once: until then others do not find it, and its memory is not free.
_WRITE_BYTES, _MOST_AT_ONCE = 32 * 2**20, 512
# After an error nothing is written for so long.
_REST_SECONDS = 60.0
_END_SECONDS = 60.0
_CLOCK_GRAIN_NS = 100_000_000
# The most that is read at once, and by how many threads: a prefix's requests wait for all of it, and most of the time
# is that of copies and checksums.
_READ_BYTES, _READERS = 64 * 2**20, 2
# The use of a segment is noted as often as this.
_TOUCH_SECONDS = 10.0
_MOST_NOTED = 4096

_Waiting = tuple[bytes, Bytes | None, int | None]
"""A key, its block (None: it is taken back) and the checksum, where it is known."""


class BlockStore:
    """Blocks by key, under a name that says what they depend on. A block that is not there any more, or not what was
    written, is not found; nothing that happens to the folder is an error."""

    def __init__(self, folder: StoreFolder, shelf: str, about: dict[str, Any], sums_of: Checksums = checksums) -> None:
        """
        Args:
            shelf: the name of all that blocks depend on beside their keys.
            about: the same for people.
        """
        self.folder, self._shelf, self._sums_of = folder, shelf, sums_of
        self._places: dict[bytes, Place] = {}
        self._indices: dict[str, SegmentIndex] = {}
        self._folder_time = -1
        self._touched: dict[Path, float] = {}
        self._noted: dict[bytes, float] = {}  # when prefixes were, by their last keys
        self._writing = _Writing(folder, shelf, about, sums_of)
        # At the process's end, too, what waits is written.
        self._end = weakref.finalize(self, _Writing.end, self._writing)

    # -- finding ------------------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Find what other processes have added, and forget what was removed. Whether anything was added."""
        is_new = False
        with contextlib.suppress(OSError):
            self._find_segments()
            for name in list(self._indices):
                try:
                    for key, place in self._indices[name].read_new():
                        is_new = True
                        if place is None:
                            self._places.pop(key, None)
                        else:
                            self._places[key] = place
                            self._writing.keys.pop(key, None)
                except OSError:
                    self._forget_segment(name)
        return is_new

    def _find_segments(self) -> None:
        changed = os.stat(self.folder.path).st_mtime_ns
        if changed == self._folder_time:
            return
        # A change within the clock's grain would not be seen.
        self._folder_time = changed if time.time_ns() - changed > _CLOCK_GRAIN_NS else -1
        written = [(key, path) for key, path in list(self._writing.keys.items()) if path is not None]
        there = {segment.path.name: segment.path for segment in self.folder.segments(self._shelf)}
        for key, path in written:
            # Its segment has gone before it was found there.
            if path.name not in there:
                self._writing.keys.pop(key, None)
        for name in self._indices.keys() - there.keys():
            self._forget_segment(name)
        for name in sorted(there.keys() - self._indices.keys()):
            # A writer may just have begun it: the next call looks again.
            try:
                self._indices[name] = SegmentIndex(there[name])
            except (OSError, ValueError):
                self._folder_time = -1

    def _forget_segment(self, name: str) -> None:
        blocks = self._indices.pop(name).blocks
        self._touched.pop(blocks, None)
        for key in [key for key, place in list(self._places.items()) if place.path == blocks]:
            del self._places[key]

    def __contains__(self, key: bytes) -> bool:
        """Whether there is such a block, as far as is known."""
        return key in self._places

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """How many of these there are, up to the first that is not there, as far as is known."""
        return len(list(takewhile(self._places.__contains__, keys)))

    def will_have(self, key: bytes) -> bool:
        """Whether it is there, or waits to be written."""
        return key in self._places or key in self._writing.keys

    def size(self, keys: Sequence[bytes]) -> int:
        """Bytes of these blocks together."""
        return sum(place.size for key in keys if (place := self._places.get(key)) is not None)

    def note_use(self, keys: Sequence[bytes]) -> None:
        """The blocks of a prefix, in order, are in use, wherever they are read from: their segments are not the first
        to go."""
        now = time.monotonic()
        if not keys or now - self._noted.get(keys[-1], -_TOUCH_SECONDS) < _TOUCH_SECONDS:
            return
        if len(self._noted) == _MOST_NOTED:
            self._noted.clear()
        self._noted[keys[-1]] = now
        for path in {place.path for key in keys if (place := self._places.get(key)) is not None}:
            if now - self._touched.get(path, -_TOUCH_SECONDS) >= _TOUCH_SECONDS:
                self._touched[path] = now
                touch(path)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Bytes]:
        """The blocks of these keys that are there and whole, up to the first that is not, uint8 [size] each. Other
        threads may call this meanwhile."""
        found: dict[bytes, Bytes] = {}
        runs = list(_runs([self._places.get(key) for key in keys]))
        with ThreadPoolExecutor(_READERS) as pool:
            for run, blocks in zip(runs, pool.map(self._read, runs), strict=True):
                found |= dict(zip(keys[len(found) :], blocks, strict=False))
                if len(blocks) < len(run):
                    break
        if len(found) < len(keys):
            self.forget(keys[len(found)])
        for path in {run[0].path for run in runs}:
            touch(path)
        return found

    def _read(self, run: list[Place]) -> list[Bytes]:
        path = run[0].path
        try:
            with path.open("rb", buffering=0) as file:
                blocks = read_blocks(run, file.fileno(), self._sums_of)
            if len(blocks) < len(run):
                warn_once(logger, "kv_store: %s is damaged: such blocks are computed again", path)
            return blocks
        except FileNotFoundError:
            pass
        except OSError as error:
            warn_once(logger, "kv_store: %s cannot be read, such blocks are computed again: %s", path, error)
        return []

    def forget(self, key: bytes) -> None:
        """Do not find this block any more."""
        self._places.pop(key, None)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, key: bytes, block: Bytes, checksum: int | None = None) -> bool:
        """Write a block, uint8 [N], which may not change from now on, some time later. `checksum`: its own, where the
        caller has it. False: too many wait."""
        return self.write_all([(key, block, checksum)]) == 1

    def write_all(self, blocks: Sequence[_Waiting]) -> int:
        """The same of several: how many of them, from the first on, are going to be written."""
        return self._writing.put(blocks)

    def take_back(self, keys: Sequence[bytes]) -> None:
        """No process is to use these blocks."""
        for key in keys:
            self.forget(key)
        self._writing.take_back(keys)

    def flush(self, seconds: float = _END_SECONDS, number: int | None = None) -> bool:
        """Wait until what waits is written, or, with `number`, the first so many of all that was given. False: it
        takes longer."""
        return self._writing.wait(seconds, number)

    @property
    def num_given(self) -> int:
        """Blocks that were given to be written, or taken back, since the start."""
        return self._writing.num_given

    def close(self) -> None:
        """Write what waits, and end the segment."""
        self._end()

    @property
    def num_written(self) -> int:
        """Blocks that were written since the start."""
        return self._writing.num_written


def _runs(places: Sequence[Place | None]) -> Iterator[list[Place]]:
    """Places up to the first that is None, in runs of such that lie one after the other and are read at once."""
    run: list[Place] = []
    for place in places:
        if place is None:
            break
        is_next = run and (run[-1].path, run[-1].start + run[-1].size) == place[:2]
        if run and not (is_next and place.start + place.size - run[0].start <= _READ_BYTES):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


class _Writing:
    """A thread that writes blocks in their order.

    Attributes:
        keys: of the blocks that wait, with None, and of those that were written and not found yet, with the path of
            their segment's index.
    """

    def __init__(self, folder: StoreFolder, shelf: str, about: dict[str, Any], sums_of: Checksums) -> None:
        self._folder, self._shelf, self._about, self._sums_of = folder, shelf, about, sums_of
        self.keys: dict[bytes, Path | None] = {}
        self.num_written = self.num_given = 0
        self._waiting: deque[_Waiting] = deque()
        self._num_bytes = 0
        self._rests_until = 0.0
        self._segment: SegmentWriter | None = None
        self._change = threading.Condition()
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def put(self, blocks: Sequence[_Waiting]) -> int:
        with self._change:
            if self._is_ending or time.monotonic() < self._rests_until:
                return 0
            for number, (key, block, checksum) in enumerate(blocks):
                size = 0 if block is None else block.nbytes
                if self._num_bytes + size > MOST_UNWRITTEN_BYTES and self._waiting:
                    return number
                self._num_bytes += size
                self.keys[key] = None
                self._append(key, block, checksum)
        return len(blocks)

    def take_back(self, keys: Sequence[bytes]) -> None:
        with self._change:
            if not self._is_ending:
                for key in keys:
                    self._append(key, None, 0)

    def _append(self, key: bytes, block: Bytes | None, checksum: int | None) -> None:
        self._waiting.append((key, block, checksum))
        self.num_given += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
            self._thread.start()
        self._change.notify_all()

    def wait(self, seconds: float, number: int | None) -> bool:
        with self._change:
            end = self.num_given if number is None else number
            return self._change.wait_for(lambda: self.num_given - len(self._waiting) >= end, seconds)

    def end(self) -> None:
        with self._change:
            self._is_ending = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    break
            self._write_next()
        if self._segment is not None:
            self._segment.close()

    def _write_next(self) -> None:
        """Write those that have waited longest. Afterwards nothing here holds their memory, which the next step may
        need."""
        with self._change:
            waiting = list(islice(self._waiting, _MOST_AT_ONCE))
        error: OSError | None = None
        count = 0
        try:
            count = self._write(waiting)
        except OSError as problem:
            error = problem
        with self._change:
            for _ in range(count):
                self._drop_first()
            if error is not None:
                self._rest(error)
            self._change.notify_all()

    def _write(self, waiting: list[_Waiting]) -> int:
        """Write the first of these, as many as go at once: their number."""
        sizes = [0 if block is None else block.nbytes for _, block, _ in waiting]
        if self._segment is None or not self._segment.takes(sizes[0]):
            if self._segment is not None:
                self._segment.close()
                self._segment = None
            self._segment = self._folder.begin_segment(self._shelf, self._about, sizes[0] + 8 * ENTRY_BYTES + 4096)
        count, total = 1, sizes[0]
        while count < len(sizes) and total + sizes[count] <= _WRITE_BYTES:
            if not self._segment.takes(total + sizes[count], count + 1):
                break
            total += sizes[count]
            count += 1
        self._segment.add([self._new(*each) for each in waiting[:count]])
        for key, block, _ in waiting[:count]:
            self.num_written += block is not None
            if key in self.keys:
                self.keys[key] = self._segment.path
        return count

    def _new(self, key: bytes, block: Bytes | None, checksum: int | None) -> NewBlock:
        if checksum is None:
            assert block is not None
            [checksum] = self._sums_of(block, 1)
        return NewBlock(key, block, checksum)

    def _rest(self, error: OSError) -> None:
        warn_once(logger, "kv_store: blocks are not kept for now, as they cannot be written: %s", error)
        self._rests_until = time.monotonic() + _REST_SECONDS
        for key, _, _ in self._waiting:
            self.keys.pop(key, None)
        while self._waiting:
            self._drop_first()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _drop_first(self) -> None:
        _, block, _ = self._waiting.popleft()
        self._num_bytes -= 0 if block is None else block.nbytes
