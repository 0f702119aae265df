"""A segment: a file of blocks of bytes, one after the other, and a file that says what they are.

One process writes it, and holds a lock on its index as long as it lives; the system frees the lock of a process that
was killed. An entry is written to the index once its block is, so whoever reads the index finds whole blocks; after a
loss of power the checksums tell. An entry of size 0 takes its key back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

INDEX, BLOCKS = ".index", ".blocks"
LONGEST_KEY = 31
_MAGIC = b"VLLMKV01"
_HEAD = struct.Struct("<8sQII")  # capacity in bytes, size and CRC-32 of the description
_ENTRY = struct.Struct("<B31sQQQ")  # size of the key, key, start, size, checksum
_SEAL = struct.Struct("<II")  # CRC-32 of the entry, nothing
ENTRY_BYTES = _ENTRY.size + _SEAL.size
_WORDS = 64  # 512 bytes, a sector
# So much is read before it is summed: it is in the core's own cache then.
_PIECE_BYTES = 2**20

Checksums = Callable[[Bytes, int], list[int]]
"""`checksums`, or what computes the same."""


class DamagedSegmentError(ValueError):
    """An index does not begin as one does."""


class Place(NamedTuple):
    """Where a block is: `size` bytes from `start` on in the file `path`, and their checksum."""

    path: Path
    start: int
    size: int
    checksum: int


class NewBlock(NamedTuple):
    """A block to write, uint8 [N], and its checksum; None: its key is taken back."""

    key: bytes
    data: Bytes | None
    checksum: int


def checksums(data: Bytes, count: int) -> list[int]:
    """64 bits of each of `count` equal parts of uint8 [N]: sums of sectors, each times an odd number of its own. A
    flipped bit changes it, and so do sectors that are missing or elsewhere; it is no defence against intent."""
    parts = data.reshape(count, -1)
    size = parts.shape[1]
    whole = size // (8 * _WORDS) * (8 * _WORDS)
    sums = parts[:, :whole].view(np.uint64).reshape(count, whole // (8 * _WORDS), _WORDS).sum(axis=2)
    if whole < size:
        tails = np.zeros((count, 8 * _WORDS), dtype=np.uint8)
        tails[:, : size - whole] = parts[:, whole:]
        sums = np.append(sums, tails.view(np.uint64).sum(axis=1, keepdims=True), axis=1)
    totals = sums @ np.arange(1, 2 * sums.shape[1] + 1, 2, dtype=np.uint64)
    return [(total + size) % 2**64 for total in totals.tolist()]


def read_blocks(places: Sequence[Place], file: int, sums_of: Checksums = checksums) -> list[Bytes]:
    """Read blocks that lie one after the other in an open file, uint8 [size] each, parts of one array, up to the first
    that is not what was written. OSError: they cannot be read."""
    whole = np.empty(sum(place.size for place in places), dtype=np.uint8)
    found: list[Bytes] = []
    begin = 0
    for size, same in groupby(place.size for place in places):
        left = sum(1 for _ in same)
        while left:
            count = min(left, max(_PIECE_BYTES // size, 1))
            piece = whole[begin : begin + count * size]
            num_whole = _read(file, piece, places[0].start + begin) // size
            sums = sums_of(piece[: num_whole * size], num_whole) if num_whole else []
            for number, total in enumerate(sums):
                if total != places[len(found)].checksum:
                    return found
                found.append(piece[number * size : (number + 1) * size])
            if num_whole < count:
                return found
            left, begin = left - count, begin + count * size
    return found


def _read(file: int, data: Bytes, start: int) -> int:
    """Read up to the end of `data`, or of the file: the bytes read."""
    done = 0
    while done < data.nbytes:
        read = os.preadv(file, [data.data[done:]], start + done)
        if not read:
            break
        done += read
    return done


class SegmentIndex:
    """The content of a segment, as far as it has been read.

    Attributes:
        about: the writer's description.
        capacity: the most bytes that both files will have.
    """

    def __init__(self, path: Path) -> None:
        """OSError: it cannot be read. DamagedSegmentError: it is none."""
        self.path, self.blocks = path, path.with_suffix(BLOCKS)
        with path.open("rb", buffering=0) as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise DamagedSegmentError(f"{path.name} is cut")
            magic, self.capacity, size, crc = _HEAD.unpack(head)
            text = file.read(size) if magic == _MAGIC else b""
        if zlib.crc32(text) != crc or len(text) != size or magic != _MAGIC:
            raise DamagedSegmentError(f"{path.name} is damaged in its description")
        self.about: dict[str, Any] = json.loads(text)
        self._at = _HEAD.size + size

    def read_new(self) -> list[tuple[bytes, Place | None]]:
        """The keys that were added since the last call, in order; None: what was there before is not to be used. An
        entry that is damaged ends the list. OSError: it cannot be read."""
        if os.stat(self.path).st_size < self._at + ENTRY_BYTES:
            return []
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._at)
            data = file.read()
        found: list[tuple[bytes, Place | None]] = []
        for begin in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
            entry = data[begin : begin + _ENTRY.size]
            crc, _ = _SEAL.unpack_from(data, begin + _ENTRY.size)
            if zlib.crc32(entry) != crc:
                break
            length, key, start, size, total = _ENTRY.unpack(entry)
            found.append((key[:length], Place(self.blocks, start, size, total) if size else None))
            self._at += ENTRY_BYTES
        return found


class SegmentWriter:
    """A segment that this process writes, which holds its lock.

    Attributes:
        path: of the index.
    """

    def __init__(self, path: Path, about: dict[str, Any], capacity: int) -> None:
        """`path`: of the index, which must not be there; `capacity`: the most bytes of both files. OSError: they cannot
        be made."""
        self.path, self.blocks = path, path.with_suffix(BLOCKS)
        self._capacity, self._at = capacity, 0
        self._files = [_create(path)]
        try:
            fcntl.flock(self._files[0], fcntl.LOCK_EX)
            self._files.append(_create(self.blocks))
            text = json.dumps(about, separators=(",", ":")).encode()
            head = _HEAD.pack(_MAGIC, capacity, len(text), zlib.crc32(text)) + text
            _write(self._files[0], head, 0)
            self._index_at = len(head)
        except BaseException:
            self.close()
            for file in (self.path, self.blocks):
                file.unlink(missing_ok=True)
            raise

    def takes(self, size: int, count: int = 1) -> bool:
        """Whether there is room for `count` blocks of so many bytes together, and the segment has not been removed."""
        if os.fstat(self._files[0]).st_nlink == 0:
            return False
        return self._at + size + self._index_at + count * ENTRY_BYTES <= self._capacity

    def add(self, blocks: Sequence[NewBlock]) -> None:
        """Write blocks. OSError: there is no room; the index may end with a part of an entry then, so that no more may
        be added. What stands before that is whole."""
        start, entries = self._at, b""
        for key, data, total in blocks:
            if data is None:
                entries += _entry(key, 0, 0, 0)
                continue
            # One by one: for larger writes the system takes larger pages, which a virtual machine's host has to find.
            _write(self._files[1], data.data, start)
            entries += _entry(key, start, data.nbytes, total)
            start += data.nbytes
        _write(self._files[0], entries, self._index_at)
        self._at, self._index_at = start, self._index_at + len(entries)

    def close(self) -> None:
        """End the segment; another process may remove it from now on."""
        for file in self._files:
            with contextlib.suppress(OSError):
                os.close(file)
        self._files.clear()


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _entry(key: bytes, start: int, size: int, total: int) -> bytes:
    assert len(key) <= LONGEST_KEY
    entry = _ENTRY.pack(len(key), key, start, size, total)
    return entry + _SEAL.pack(zlib.crc32(entry), 0)


def _write(file: int, data: bytes | memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], start + done)
