"""Memory that the C library gives and takes."""

from __future__ import annotations

import ctypes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is why torch or Python failed: on the CPU torch raises a plain RuntimeError."""
    said = str(error)
    return (
        type(error).__name__ in ("MemoryError", "OutOfMemoryError")
        or "can't allocate memory" in said
        or "not enough memory" in said
    )


def return_freed_memory() -> None:
    """Return freed memory to the system, which glibc keeps otherwise, even where fragmentation makes it useless for
    larger allocations. Takes milliseconds; no effect with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
