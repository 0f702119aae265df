"""How guests that wait for something else let time pass."""

from __future__ import annotations

import threading


class Rest:
    """A rest ends early once `wake` is called, from any thread, also if that was before it began."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def __call__(self, seconds: float) -> None:
        """Let so many seconds pass at most."""
        self._woken.wait(seconds)
        self._woken.clear()

    def wake(self, _: object = None) -> None:
        """Something that is waited for is there; also a future's callback."""
        self._woken.set()
