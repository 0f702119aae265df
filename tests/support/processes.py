"""Processes, as the system sees them."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

SPARE = "spare"
"""The name of a process that others are forked from; see preloaded.py."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_libc = ctypes.CDLL(None)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Process ids of its children, but for spare ones; none of a process that has ended."""
    pids = _text(f"/proc/{pid}/task/{pid}/children").split()
    return [int(child) for child in pids if _text(f"/proc/{child}/comm").strip() != SPARE]


def descendants(pid: int) -> list[int]:
    """Process ids of its children, and of theirs."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def set_name(name: str) -> None:
    """This process's, as the system shows it."""
    _libc.prctl(_PR_SET_NAME, name.encode())


def end_with_parent() -> None:
    """For a process that has just started: a run of tests that is killed leaves it not behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
