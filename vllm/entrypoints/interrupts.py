"""Ctrl-C between steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class InterruptsBetweenSteps:
    """Within this context Ctrl-C takes effect when `check` is called, or at the end.

    A KeyboardInterrupt may come between any two operations, and no bookkeeping is safe from one that stops it
    half way: a block taken from the pool and not yet entered anywhere is lost for good. A second Ctrl-C takes
    effect at once, for those who cannot wait for a long step. Does nothing outside the main thread, which
    gets all signals, and where Ctrl-C means something else than a Python handler.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        if error is None:
            self.check()

    def check(self) -> None:
        """Let a Ctrl-C that came meanwhile take effect.

        Raises:
            KeyboardInterrupt: or whatever the handler of the surrounding program raises.
        """
        if self._pending and self._previous is not None:
            self._pending = False
            self._previous(signal.SIGINT, None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._pending and self._previous is not None:
            self._previous(signum, frame)
        self._pending = True
