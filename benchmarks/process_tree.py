"""A process with all that it started, seen from outside through /proc: processor time and peak memory. Linux only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from common import status_kib

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> list[int]:
    """The process and its descendants that are alive, itself first."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        found.append(parent)
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                queue += map(int, (thread / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of the tree's living processes and of the ended children they waited for."""
    total = 0
    for member in process_tree(pid):
        with contextlib.suppress(OSError):
            # After the name, which may hold spaces: fields 14 to 17 are utime, stime, cutime, cstime.
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / _TICKS_PER_SECOND


def reset_peak(pid: int) -> None:
    """Let the peak memory of each process of the tree start from what it holds now."""
    for member in process_tree(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{member}/clear_refs").write_text("5")


def peak_mib(pid: int) -> float:
    """Most memory that the tree has held, in MiB: the peak of its largest process, and the other processes' memory
    that is no file's. What they map of files is mostly the same libraries, so this is a lower bound for an engine of
    several processes, and exact for one of one."""
    peaks, own = [], []
    for member in process_tree(pid):
        status = status_kib(member)
        if "VmHWM" in status:
            peaks.append(status["VmHWM"])
            own.append(status["RssAnon"])
    if not peaks:
        return 0.0
    largest = max(range(len(peaks)), key=peaks.__getitem__)
    return (peaks[largest] + sum(own) - own[largest]) / 1024
