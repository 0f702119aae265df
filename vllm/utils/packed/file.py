"""A file of packed weights: their bytes, then a JSON text that says what they are, then where that text begins.

Bytes begin on cache lines, those of large tensors on pages. Each tensor has a checksum, and the JSON text a CRC-32. A
file without its end, or with another one, is none.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm.utils.host_memory import MADV_POPULATE_READ

_MAGIC = b"VLLMPACK"
_END = struct.Struct("<QQQ8s")  # start, size and CRC-32 of the JSON text
_LINE, _PAGE = 64, 4096
_LARGE = 1 << 20
_CHUNK = 1 << 26
# A huge page. The page cache has one for a block that is written at once, or read by a mapping that asks for it.
_HUGE = 1 << 21
_MAP_NORESERVE = 0x4000
# Bits of /proc/self/pagemap: the page is there, and is the file's own.
_PRESENT, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 61)


class DamagedFileError(ValueError):
    """A file is not what was written."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a tensor.

    Attributes:
        start, size: in bytes, in the file.
        checksum: of these bytes, by `add_checksum`; None where they are another file's.
        source: which of `Content.sources` has them in place of this file.
    """

    start: int
    size: int
    checksum: int | None = None
    source: int | None = None


@dataclass(frozen=True)
class Content:
    """All that a file says of its bytes.

    Attributes:
        about: for people, and the fingerprint.
        pieces: by number.
        sources: absolute paths of other files that have pieces.
        state: of the model; tensors are numbers of pieces in it.
    """

    about: dict[str, Any]
    pieces: list[Piece]
    sources: list[str]
    state: Any

    @property
    def num_bytes(self) -> int:
        """The size in bytes of the pieces in the file itself."""
        return sum(piece.size for piece in self.pieces if piece.source is None)


def read_content(path: Path) -> Content:
    """A file's content. Raises OSError, and DamagedFileError for a file that is not whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _PAGE + _END.size:
            raise DamagedFileError(f"{path.name} is cut")
        file.seek(size - _END.size)
        start, length, crc, magic = _END.unpack(file.read(_END.size))
        if magic != _MAGIC or start + length != size - _END.size:
            raise DamagedFileError(f"{path.name} is cut")
        file.seek(start)
        text = file.read(length)
    if zlib.crc32(text) != crc:
        raise DamagedFileError(f"{path.name} is damaged in its description")
    raw = json.loads(text)
    return Content(raw["about"], [Piece(*piece) for piece in raw["pieces"]], raw["sources"], raw["state"])


def find_damage(path: Path, should_stop: Callable[[], bool] = lambda: False) -> str | None:
    """The damage of a file, in words, by the checksums of all of its bytes; None: nothing, or it was told to
    stop. OSError: it cannot be read."""
    try:
        content = read_content(path)
    except DamagedFileError as error:
        return str(error)
    # Buffered: such files read as many bytes as they are asked for.
    with path.open("rb") as file:
        for piece in content.pieces:
            if piece.source is not None:
                continue
            file.seek(piece.start)
            checksum, rest = 0, piece.size
            while rest:
                if should_stop():
                    return None
                read = file.read(min(rest, _CHUNK))
                if not read:
                    return f"{path.name} is cut"
                checksum, rest = add_checksum(checksum, np.frombuffer(read, np.uint8)), rest - len(read)
            if checksum != piece.checksum:
                return f"{path.name} is damaged between bytes {piece.start:,} and {piece.start + piece.size:,}"
    return None


def add_checksum(checksum: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Carry a checksum, at first 0, on over uint8 [n], in whole pages but for the last part: the CRC-32 of each page's
    sum of 64-bit words, then of the bytes after the last whole page. Memory is read as fast as it can be, which a
    CRC-32 of all bytes is not; a word that changes changes its page's sum."""
    whole = data.nbytes // _PAGE * _PAGE
    sums = data[:whole].view(np.uint64).reshape(-1, _PAGE // 8).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[whole:].data, zlib.crc32(sums.data, checksum))


class Mapping:
    """A file's bytes in memory, shared with all processes that map it. What is written to them stays in this process:
    the system copies a page at the first write."""

    def __init__(self, file: int | Path, size: int | None = None) -> None:
        """`file`: open, or a path; `size` in bytes, where that is not the file's. OSError: it cannot be mapped."""
        number = os.open(file, os.O_RDONLY | os.O_CLOEXEC) if isinstance(file, Path) else file
        try:
            flags = mmap.MAP_PRIVATE | (_MAP_NORESERVE if os.uname().sysname == "Linux" else 0)
            length = os.fstat(number).st_size if size is None else size
            self.memory = mmap.mmap(number, length, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            if isinstance(file, Path):
                os.close(number)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self._advise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
        # A product with one row reads each weight once: looking up small pages took up to 40 % of its time.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._give_advice(0, length, mmap.MADV_HUGEPAGE)

    def __len__(self) -> int:
        return len(self.bytes)

    def end_at(self, size: int) -> None:
        """The file has so many bytes, and will have no more."""
        self.bytes = self.bytes[:size]

    def populate(self) -> None:
        """Read the file from its first byte to its last, and have the pages in this process's tables. Other threads run
        meanwhile."""
        for start in range(0, len(self), _CHUNK):
            if not self._read(start, min(_CHUNK, len(self) - start)):
                return

    def read_ahead(self, step: int, should_stop: Callable[[], bool]) -> None:
        """Read the file, `step` bytes at once, without pages in this process's tables."""
        for start in range(0, len(self), step):
            size = min(step, len(self) - start)
            if should_stop() or not self._read(start, size):
                return
            self.release(start, size)

    def release(self, start: int, size: int) -> bool:
        """Take the whole pages of a range, which were never written to, out of this process's tables. Whether the
        system did."""
        first, last = -(-start // mmap.PAGESIZE), (start + size) // mmap.PAGESIZE
        return self._give_advice(first * mmap.PAGESIZE, max(last - first, 0) * mmap.PAGESIZE, mmap.MADV_DONTNEED)

    def _read(self, start: int, size: int) -> bool:
        # Older systems only read ahead.
        return any(self._give_advice(start, size, each) for each in (MADV_POPULATE_READ, mmap.MADV_WILLNEED))

    def drop_pages(self) -> int:
        """Give the memory of what this process has not written to back to the system, which reads it again when it is
        needed. Returns how many bytes; 0 where the system does not say which pages those are."""
        dropped = 0
        for start, stop in self._pages_of_file():
            if self.release(start, stop - start):
                dropped += stop - start
        return dropped

    def _give_advice(self, start: int, size: int, advice: int) -> bool:
        if self._advise is None:
            return False
        return self._advise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(size), advice) == 0

    def _pages_of_file(self) -> Iterator[tuple[int, int]]:
        """Runs of pages that are the file's own."""
        first, count = self.address // mmap.PAGESIZE, -(-len(self) // mmap.PAGESIZE)
        with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as table:
            table.seek(8 * first)
            entries = np.frombuffer(table.read(8 * count), dtype=np.uint64)
            is_own = (entries & (_PRESENT | _OF_FILE)) == (_PRESENT | _OF_FILE)
            edges = np.flatnonzero(np.diff(is_own, prepend=False, append=False))
            for start, stop in edges.reshape(-1, 2).tolist():
                yield start * mmap.PAGESIZE, stop * mmap.PAGESIZE


class Writer:
    """A file that is being written under another name; `mapping` has its bytes as they come."""

    def __init__(self, path: Path, capacity: int, check_room: Callable[[int], None]) -> None:
        """`capacity`: more bytes than will come. `check_room` is called with how many there will be, before they are
        written; what it raises is raised."""
        self.path, self._check_room = path, check_room
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(self._file, capacity)
            self.mapping = Mapping(self._file, capacity)
            self._whole_until = 0
            self._write(memoryview(_MAGIC), 0)
        except BaseException:
            self.discard()
            raise
        self.pieces: list[Piece] = []
        self.sources: list[str] = []
        self._at = _PAGE
        self._capacity, self._checked = capacity, 0

    def add(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
        """Write a tensor's bytes, uint8 [n]: the number of their piece. OSError: there is no room."""
        unit = _PAGE if data.nbytes >= _LARGE else _LINE
        start = -(-self._at // unit) * unit
        if start + data.nbytes > self._capacity - _PAGE:
            raise OSError("the packed weights are larger than expected")
        if start + data.nbytes > self._checked:
            self._check_room(start + data.nbytes)
            self._checked = start + data.nbytes + _CHUNK
        checksum = done = 0
        while done < data.nbytes:
            # A part is read from memory once, for its checksum, and a large one ends with a block.
            end = done + _HUGE - (start + done) % _HUGE if unit == _PAGE else data.nbytes
            part = data[done:end]
            checksum = add_checksum(checksum, part)
            while part.nbytes:
                written = self._write(part.data, start + done)
                part, done = part[written:], done + written
        self._at = start + data.nbytes
        self.pieces.append(Piece(start, data.nbytes, checksum))
        return len(self.pieces) - 1

    def _write(self, data: memoryview, start: int) -> int:
        """Write bytes, and zeros up to the end of their last block if nothing was there: how many of the bytes were
        written."""
        stop = start + data.nbytes
        if stop <= self._whole_until:
            return os.pwrite(self._file, data, start)
        block_end = -(-stop // _HUGE) * _HUGE
        written = os.pwritev(self._file, (data, bytes(block_end - stop)), start)
        self._whole_until = max(self._whole_until, (start + written) // _HUGE * _HUGE)
        return min(written, data.nbytes)

    def refer(self, source: Path, start: int, size: int) -> int:
        """The number of a piece whose bytes another file has."""
        name = str(source)
        if name not in self.sources:
            self.sources.append(name)
        self.pieces.append(Piece(start, size, None, self.sources.index(name)))
        return len(self.pieces) - 1

    def finish(self, about: dict[str, Any], state: Any, path: Path) -> None:
        """Write the description, and give the file its name. OSError: there is no room."""
        pieces = [[piece.start, piece.size, piece.checksum, piece.source] for piece in self.pieces]
        content = {"about": about, "pieces": pieces, "sources": self.sources, "state": state}
        text = json.dumps(content, separators=(",", ":")).encode()
        end = _END.pack(self._at, len(text), zlib.crc32(text), _MAGIC)
        self._check_room(self._at + len(text) + len(end))
        os.ftruncate(self._file, self._at)
        at = self._at
        for part in (text, end):
            done = 0
            while done < len(part):
                done += os.pwrite(self._file, part[done:], at + done)
            at += len(part)
        os.replace(self.path, path)
        self.mapping.end_at(at)
        self._close()

    def discard(self) -> None:
        """Remove what was written; memory that is mapped stays."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
