"""Numbers that go up."""

from __future__ import annotations

import threading


class Counter:
    """`next` gives one number after another."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        value = self.counter
        self.counter += 1
        return value

    def reset(self) -> None:
        """Begin at 0 again."""
        self.counter = 0


class AtomicCounter:
    """A number that several threads count up and down."""

    def __init__(self, initial: int = 0) -> None:
        self._value = initial
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """The number."""
        return self._value

    def inc(self, num: int = 1) -> int:
        """Add to it; returns the sum."""
        with self._lock:
            self._value += num
            return self._value

    def dec(self, num: int = 1) -> int:
        """Take away from it; returns the difference."""
        return self.inc(-num)
