"""Races of the threads of a launch: what the machine that runs PTX, which lets one block follow another, cannot show.

Of each byte of memory it is known who wrote and who read it last. An access is ordered after another one if it comes
from the same thread; from the same block after a barrier; or from a block that saw, by an acquiring atomic, what the
other one released after a barrier. Atomics do not race with each other.
"""

from __future__ import annotations

import numpy as np

# A code says who, a block's number from 1; when, the barriers that it has passed; which, the thread's number.
_BLOCK, _TIME, _THREAD = 40, 11, (1 << 11) - 1
_TIMES = (1 << (_BLOCK - _TIME)) - 1
# No thread's number.
_SEVERAL_THREADS = _THREAD
_SEVERAL_BLOCKS = (1 << 22) << _BLOCK


class Races:
    """Watches the accesses of a launch's blocks, one block after the other."""

    def __init__(self, num_blocks: int) -> None:
        self._accesses: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._released: dict[int, np.ndarray] = {}
        self._seen = np.zeros(num_blocks + 1, dtype=np.int64)
        self._acquired: list[np.ndarray] = []
        self._block = self._time = 0

    def begin_block(self) -> None:
        """Another block begins; it knows nothing of the others."""
        self._block, self._time = self._block + 1, 0
        self._seen = np.zeros_like(self._seen)
        self._acquired = []

    def barrier(self) -> None:
        """All threads of the block wait for each other."""
        self._time += 1
        self._seen = np.maximum.reduce([self._seen, *self._acquired])
        self._acquired = []

    def read(self, piece: np.ndarray, cells: np.ndarray, threads: np.ndarray) -> None:
        """Threads [accesses] read these bytes [accesses, bytes] of a piece of memory."""
        writers, atomics, readers = self._of(piece)
        own = self._codes(threads, cells)
        for before in (writers, atomics):
            self._check("reads what", before[cells], own)
        self._join(readers, cells, own)

    def write(self, piece: np.ndarray, cells: np.ndarray, threads: np.ndarray, data: np.ndarray) -> None:
        """Threads [accesses] have written data [accesses, bytes]."""
        if not np.array_equal(piece[cells], data):
            raise RuntimeError("a race: threads write different values to the same place at once")
        writers, atomics, readers = self._of(piece)
        own = self._codes(threads, cells)
        for before in (writers, atomics, readers):
            self._check("writes over what", before[cells], own)
        writers[cells] = own
        readers[cells] = atomics[cells] = 0

    def atomic(self, piece: np.ndarray, cells: np.ndarray, thread: int, synchronises: bool) -> None:
        """A thread changes these bytes [bytes]. What it acquires, if it does, the block knows after a barrier."""
        writers, atomics, readers = self._of(piece)
        own = self._codes(np.array([thread]), cells[None])[0]
        for before in (writers, readers):
            self._check("changes what", before[cells], own)
        if not synchronises:
            self._join(atomics, cells, own)
            return
        atomics[cells] = own
        place = id(piece), int(cells[0])
        before = self._released.get(place, np.zeros_like(self._seen))
        self._acquired.append(before)
        self._released[place] = np.maximum(before, self._seen)
        self._released[place][self._block] = self._time

    def _of(self, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each byte, who wrote it, who changed it by an atomic and who read it, 0 for nobody since the last
        write."""
        if id(piece) not in self._accesses:
            writers, atomics, readers = (np.zeros(len(piece), dtype=np.int64) for _ in range(3))
            self._accesses[id(piece)] = writers, atomics, readers
        return self._accesses[id(piece)]

    def _codes(self, threads: np.ndarray, cells: np.ndarray) -> np.ndarray:
        codes = self._block << _BLOCK | self._time << _TIME | threads.astype(np.int64)
        return np.broadcast_to(codes[:, None], cells.shape)

    def _join(self, record: np.ndarray, cells: np.ndarray, own: np.ndarray) -> None:
        """Enter these accesses without forgetting such as they are not ordered after."""
        before = record[cells]
        apart = ~self._are_ordered(before, own)
        record[cells] = own
        several = apart | (record[cells] != own)
        record[cells[several]] = own[several] | _SEVERAL_THREADS
        record[cells[apart & (before >> _BLOCK != self._block)]] = _SEVERAL_BLOCKS

    def _are_ordered(self, before: np.ndarray, own: np.ndarray) -> np.ndarray:
        block, time = before >> _BLOCK, before >> _TIME & _TIMES
        is_same = block == self._block
        seen = self._seen[np.where(block < len(self._seen), block, 0)]
        in_block = (time < self._time) | (before & _THREAD == own & _THREAD)
        return (before == 0) | np.where(is_same, in_block, time < seen)

    def _check(self, what: str, before: np.ndarray, own: np.ndarray) -> None:
        if not before.any():
            return
        racing = ~self._are_ordered(before, own)
        if racing.any():
            thread = int(own[racing][0]) & _THREAD
            raise RuntimeError(
                f"a race: thread {thread} of block {self._block} {what} {_named(int(before[racing][0]))} accessed"
            )


def _named(code: int) -> str:
    if code >= _SEVERAL_BLOCKS:
        return "several blocks"
    thread = "several threads" if code & _THREAD == _SEVERAL_THREADS else f"thread {code & _THREAD}"
    return f"{thread} of block {code >> _BLOCK}"
