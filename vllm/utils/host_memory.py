"""Memory that the C library gives and takes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is why torch or Python failed: on the CPU torch raises a plain RuntimeError."""
    said = str(error)
    return (
        type(error).__name__ in ("MemoryError", "OutOfMemoryError")
        or "can't allocate memory" in said
        or "not enough memory" in said
    )


def available_bytes() -> int:
    """MemAvailable of /proc/meminfo; 8 GiB where there is no such file."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 8 * 2**30


def return_freed_memory() -> None:
    """Return freed memory to the system, which glibc keeps otherwise, even where fragmentation makes it useless for
    larger allocations. Takes milliseconds; no effect with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


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

    def add(self, address: int, num_bytes: int) -> None:
        """So many bytes from there on have been read."""
        size = mmap.PAGESIZE
        pages = range(-(-address // size) * size, (address + num_bytes) // size * size)
        if not any(each.start <= pages.start and pages.stop <= each.stop for each in self._mapped) or not pages:
            return
        before, now = self._passed
        now.append(pages)
        self._num_bytes += num_bytes
        if self._num_bytes >= self._KEPT and self._advise is not None:
            for each in before:
                self._advise(ctypes.c_void_p(each.start), ctypes.c_size_t(len(each)), mmap.MADV_DONTNEED)
            self._passed, self._num_bytes = (now, []), 0
