"""Memory of the machine that runs PTX: the process's own, of which an access must lie inside of what it was given."""

from __future__ import annotations

import ctypes

import numpy as np

SHARED_BASE = 1 << 40
"""Where addresses of shared memory begin."""


class Memory:
    """Pieces of the process's memory by address, and a block's shared memory."""

    def __init__(self, shared_bytes: int) -> None:
        self._pieces: list[tuple[int, np.ndarray]] = []
        self.shared = np.zeros(shared_bytes, dtype=np.uint8)

    def allow(self, address: int, num_bytes: int) -> None:
        """Let the kernel read and write there."""
        if num_bytes:
            piece = np.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=np.uint8)
            self._pieces.append((address, piece))

    def at(self, addresses: np.ndarray, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """The piece that holds all of these accesses, and their bytes' places in it, [accesses, num_bytes].

        Raises:
            IndexError: one of them lies outside, or is not aligned.
        """
        if (addresses % num_bytes).any():
            raise IndexError(f"accesses of {num_bytes} bytes that are not aligned")
        first, last = int(addresses.min()), int(addresses.max()) + num_bytes
        for base, piece in (*self._pieces, (SHARED_BASE, self.shared)):
            if base <= first and last <= base + len(piece):
                starts = (addresses - np.uint64(base)).astype(np.int64)
                return piece, starts[..., None] + np.arange(num_bytes)
        raise IndexError(f"an access outside of every tensor, {first:#x} to {last:#x}")
