"""Memory that the C library gives and takes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MADV_POPULATE_READ = 22
"""Advice of madvise (Linux 5.14) that Python's mmap does not name."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is why torch or Python failed: on the CPU torch raises a plain RuntimeError."""
    said = str(error)
    return (
        type(error).__name__ in ("MemoryError", "OutOfMemoryError")
        or "can't allocate memory" in said
        or "not enough memory" in said
    )


_ROOT = Path("/")
# By the controllers that a line of /proc/self/cgroup names: where groups are, and files of their limit and use.
_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes that this process may use without swapping, pages of files that can be dropped among them: MemAvailable of
    /proc/meminfo, 8 GiB where there is no such file; at most what the limits of its control groups, such as a
    container's, leave. `root`: where /proc and /sys are."""
    available = 8 * 2**30
    with contextlib.suppress(OSError), (root / "proc/meminfo").open(encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                break
    return min([available, *_left_by_groups(root)])


def _left_by_groups(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in _GROUPS:
            continue
        place, limit_name, used_name = _GROUPS[controllers]
        top = root / place
        # A container sees its own group at the top, whatever its path outside.
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            # No limit is a file that is not there, or "max".
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((group / name).read_text()) for name in (limit_name, used_name))
                stat = dict(each.split() for each in (group / "memory.stat").read_text().splitlines())
                prefix = "total_" if controllers else ""
                files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield max(limit - used + files, 0)
            if group == top:
                break


def return_freed_memory() -> None:
    """Return freed memory to the system, which glibc keeps otherwise, even where fragmentation makes it useless for
    larger allocations. Takes milliseconds; no effect with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class _Scratch:
    """Memory of tensors that live for a moment, which later ones get again: the system clears each page that a process
    has not used before, which takes longer than to fill it."""

    # Smaller ones come from the C library, which keeps their memory.
    _LEAST = 1 << 20
    _MOST_FREE = 8

    def __init__(self) -> None:
        # A tensor may be freed while another is made, by the same thread.
        self._lock = threading.RLock()
        self._free: list[mmap.mmap] = []
        self._users = 0

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within the block, memory is kept for the next ones."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._free.clear()

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """[*shape], uninitialised, of the dtype and on the device of `like`."""
        num_bytes = math.prod(shape) * like.element_size()
        if not self._users or like.device.type != "cpu" or num_bytes < self._LEAST:
            return like.new_empty(shape)
        import numpy as np
        import torch

        memory = self._take(num_bytes)
        values = np.frombuffer(memory, np.uint8, num_bytes)
        weakref.finalize(values, self._give_back, memory).atexit = False
        return torch.from_numpy(values).view(like.dtype).view(shape)

    def _take(self, num_bytes: int) -> mmap.mmap:
        with self._lock:
            # A tensor may keep the memory for good: it must not be much larger than the tensor.
            fitting = [each for each in self._free if num_bytes <= len(each) <= num_bytes + num_bytes // 8]
            if fitting:
                # Others may have come and gone since: a tensor that a collection frees gives its memory back here.
                self._free = [each for each in self._free if each is not fitting[-1]]
                return fitting[-1]
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            if self._users:
                self._free = [*self._free[1 - self._MOST_FREE :], memory]


scratch = _Scratch()


def rows_at_once(width: int) -> int:
    """Rows of a weight that are rounded together: their float32 values stay in a core's cache, and their memory with
    the C library."""
    return max(1, (1 << 18) // max(width, 1))


class PassedPages:
    """Gives back the memory of a mapped file that was read, behind its readers: the system keeps it cached, and reads
    what is needed after all from there. The mapping must never have been written to. No effect but on Linux."""

    # Bytes that stay behind the last one, at least: what is still being read.
    _KEPT = 32 << 20

    def __init__(self, path: Path) -> None:
        self._advise = getattr(ctypes.CDLL(None), "madvise", None)
        self._mapped: list[range] = []
        try:
            lines = Path("/proc/self/maps").read_text().splitlines()
        except OSError:
            return
        file = str(path.resolve())
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == file:
                start, end = (int(bound, 16) for bound in fields[0].split("-"))
                self._mapped.append(range(start, end))
        self._passed: tuple[list[range], list[range]] = [], []
        self._num_bytes = 0
        # By their first bytes, the ends of what tensors hold that are read later.
        self._held: dict[int, int] = {}
        _being_read.add(self)

    def add(self, address: int, num_bytes: int) -> None:
        """So many bytes from there on have been read, or are by those that hold them."""
        pages = _pages_within(address, address + num_bytes)
        if not pages or not self._has(pages):
            return
        if any(first < pages.stop and pages.start < end for first, end in self._held.copy().items()):
            return
        before, now = self._passed
        now.append(pages)
        self._num_bytes += num_bytes
        if self._num_bytes >= self._KEPT:
            for each in before:
                self._tell(each, mmap.MADV_DONTNEED)
            self._passed, self._num_bytes = (now, []), 0

    def hold(self, tensor: Tensor, address: int, num_bytes: int) -> bool:
        """Have a tensor's bytes read now, in large pieces, and keep them until it is gone. False: they are not of this
        file."""
        end = address + num_bytes
        pages = range(address // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        if not self._has(pages):
            return False
        self._held[address] = end
        weakref.finalize(tensor, self._let_go, address).atexit = False
        self._tell(pages, mmap.MADV_WILLNEED)
        # Older systems read in the page faults of who needs them.
        self._tell(pages, MADV_POPULATE_READ)
        return True

    def _let_go(self, address: int) -> None:
        # The tensor, and with it the mapping, is still there.
        if pages := _pages_within(address, self._held.pop(address, 0)):
            self._tell(pages, mmap.MADV_DONTNEED)

    def _has(self, pages: range) -> bool:
        return any(each.start <= pages.start and pages.stop <= each.stop for each in self._mapped)

    def _tell(self, pages: range, advice: int) -> None:
        if self._advise is not None:
            self._advise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), advice)


_being_read: weakref.WeakSet[PassedPages] = weakref.WeakSet()


def _pages_within(start: int, end: int) -> range:
    """The whole pages of a range of bytes."""
    size = mmap.PAGESIZE
    return range(-(-start // size) * size, end // size * size)


def read_later(tensor: Tensor) -> None:
    """Read a tensor of a checkpoint's file that is being iterated into memory, and leave it there as long as the tensor
    itself (not one that shares its memory) lives. No effect on other tensors, or on parts that do not lie together."""
    if tensor.is_contiguous():
        for each in list(_being_read):
            if each.hold(tensor, tensor.data_ptr(), tensor.nbytes):
                return
