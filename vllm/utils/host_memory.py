"""The C library's memory."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give what was freed back to the system: the C library keeps it for allocations to come, also where small objects
    that stayed have made it useless for larger ones. Takes milliseconds. Does nothing where the C library has no such
    call (glibc has it)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
