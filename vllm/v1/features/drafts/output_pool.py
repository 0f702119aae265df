"""Outputs of earlier requests, found by their tokens."""

from __future__ import annotations

from collections import deque
from operator import mul

import numpy as np

_CAPACITY = 1 << 20
# Matches are at least as long.
_GRAM = 3
_NUM_HEADS = 1 << 18
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


class OutputPool:
    """The last outputs, at most `most_outputs` and about a million tokens, one after another in a ring, with -1 after
    each. Places are counted from the first output ever; those of equal grams are chained, the last one first."""

    def __init__(self, most_outputs: int, capacity: int = _CAPACITY) -> None:
        self._most_outputs = most_outputs
        self._capacity = capacity
        # NumPy's zeros take no memory for what is not written.
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._tokens[0] = -1
        self._earlier = np.zeros(capacity, dtype=np.int64)  # the place before with the same hash; 0: none
        self._heads = np.zeros(_NUM_HEADS, dtype=np.int64)  # the last place of a hash; 0: none
        self._end = 1
        self._starts: deque[int] = deque()

    def add(self, output: np.ndarray) -> None:
        """Take an output's tokens, int32 [T]; of a very long one, the last ones."""
        output = output[-(self._capacity // 2) :]
        if len(output) <= _GRAM:
            return
        start, self._end = self._end, self._end + len(output) + 1
        self._tokens[np.arange(start, self._end) % self._capacity] = np.append(output, np.int32(-1))
        self._starts.append(start)
        while len(self._starts) > self._most_outputs or self._starts[0] < self._end - self._capacity:
            self._starts.popleft()
        self._chain(_hashes(output), start + _GRAM)

    def _chain(self, hashes: np.ndarray, first_place: int) -> None:
        """Link places from the first one on, one a hash."""
        order = np.argsort(hashes, kind="stable")
        hashes, places = hashes[order], order + first_place
        is_first = np.append(True, hashes[1:] != hashes[:-1])
        before = np.append(np.int64(0), places[:-1])
        self._earlier[places % self._capacity] = np.where(is_first, self._heads[hashes], before)
        is_last = np.append(is_first[1:], True)
        self._heads[hashes[is_last]] = places[is_last]

    def find(self, end: np.ndarray, depth: int, most: int) -> tuple[np.ndarray, int]:
        """(places, matched): of the last `most` places after the gram that int32 `end` ends with, those that the most
        tokens of `end` stand before, int64 [P], and how many these are, at most `depth`; none: ([], 0)."""
        candidates = self._candidates(end, most) if len(end) >= _GRAM else []
        places = np.array(candidates, dtype=np.int64)
        if not candidates:
            return places, 0
        end = end[-depth:]
        # Before the first output stands a -1, too.
        before = self._tokens.take(places[:, None] - np.arange(1, len(end) + 1), mode="wrap")
        matched = num_matched(before == end[::-1])
        longest = int(matched.max())
        return places[matched == longest], longest

    def _candidates(self, end: np.ndarray, most: int) -> list[int]:
        oldest = self._starts[0] if self._starts else self._end
        earlier, place = self._earlier.data, int(self._heads[_hash(end[-_GRAM:].tolist())])
        found: list[int] = []
        while place > oldest and len(found) < most:
            found.append(place)
            place = earlier[place % self._capacity]
        return found[::-1]

    def followers(self, places: np.ndarray, num_tokens: int) -> np.ndarray:
        """int32 [P, num_tokens]: what stands from each place on; nothing after a -1 is of the same output."""
        return self._tokens.take(places[:, None] + np.arange(num_tokens), mode="wrap")


def num_matched(is_equal: np.ndarray) -> np.ndarray:
    """int64 [P]: how many of bool [P, N] are true before the first that is not."""
    return np.logical_and.accumulate(is_equal, axis=1).sum(axis=1)


def _hash(gram: list[int]) -> int:
    """Below _NUM_HEADS."""
    return (sum(map(mul, gram, _MULTIPLIERS)) & 0xFFFFFFFF) >> 14


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """int64 [T - _GRAM + 1]: `_hash` of each gram."""
    ids, count = tokens.astype(np.uint32), len(tokens) - _GRAM + 1
    sums = sum(ids[offset : offset + count] * np.uint32(factor) for offset, factor in enumerate(_MULTIPLIERS))
    return (sums >> np.uint32(14)).astype(np.int64)
