"""Whether it is faster to read what a request begins with, or to compute it."""

from __future__ import annotations

# So much is read, and computed, before the two are compared; until then blocks are read.
_LEAST_BYTES, _LEAST_TOKENS = 16 * 2**20, 1024
# Earlier measurements count half as much after each such amount.
_HALF_BYTES, _HALF_TOKENS = 2**30, 16384


class Rate:
    """Amounts over time, of which the latest count most."""

    def __init__(self, half: float) -> None:
        self._half = half
        self._amount = self._seconds = 0.0
        self.total = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """An amount took so many seconds."""
        kept = 0.5 ** (amount / self._half)
        self._amount, self._seconds = self._amount * kept + amount, self._seconds * kept + seconds
        self.total += amount

    def seconds(self, amount: float) -> float:
        """The time that an amount takes; something must have been noted."""
        return amount * self._seconds / self._amount


class Rates:
    """Times that reading and computing took in this engine so far."""

    def __init__(self) -> None:
        self.reading, self.computing = Rate(_HALF_BYTES), Rate(_HALF_TOKENS)

    def should_read(self, num_bytes: float, num_tokens: int, num_bytes_before: float = 0.0) -> bool:
        """Whether reading so many bytes, after others that are to be read before, takes less time than computing the
        tokens whose keys and values they are."""
        if self.reading.total < _LEAST_BYTES or self.computing.total < _LEAST_TOKENS:
            return True
        return self.reading.seconds(num_bytes_before + num_bytes) < self.computing.seconds(num_tokens)
