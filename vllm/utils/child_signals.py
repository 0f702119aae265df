"""Signals to a process group (Ctrl-C in a terminal, `timeout`, a service manager) are for its first process alone: it
decides what still runs, and its children end with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def starting_child() -> Iterator[None]:
    """Start a process that calls `leave_signals_to_parent`: within this context it inherits a mask that holds signals
    back until then. This process gets its own afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Ignore what the group is sent, also what came since the process was started. Only in its main thread."""
    for each in _FOR_THE_PARENT:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_PARENT)
