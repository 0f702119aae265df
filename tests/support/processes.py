"""Processes, as the system sees them."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Process ids of its children; none of a process that has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    """Process ids of its children, and of theirs."""
    return [each for child in children(pid) for each in (child, *descendants(child))]
