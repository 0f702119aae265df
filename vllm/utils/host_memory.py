"""Memory of the C library's allocator."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return freed memory to the system, which glibc keeps otherwise, even where fragmentation makes it useless for
    larger allocations. Takes milliseconds; no effect with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
