"""Ctrl-C between steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class InterruptsBetweenSteps:
    """Within this context Ctrl-C takes effect when `check` is called, or at the end.

    A KeyboardInterrupt between two operations would break bookkeeping: a block taken from the pool and not yet entered
    anywhere is lost. A second Ctrl-C takes effect at once. Does nothing outside the main thread, which gets all
    signals, and where SIGINT has no Python handler.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._pending = False

    def __enter__(self) -> InterruptsBetweenSteps:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if kind is None:
                self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt, or what the surrounding program's handler raises, if Ctrl-C came meanwhile."""
        if self._pending and self._previous is not None:
            self._pending = False
            self._previous(signal.SIGINT, None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._pending and self._previous is not None:
            self._previous(signum, frame)
        self._pending = True
