"""How the engine core's process begins, and the names of the messages between the two processes.

Light, so that the process can be started before its parent imports what takes time: it does the same meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Messages to the core, and from it.
ADD, ABORT, CALL, STOP = b"add", b"abort", b"call", b"stop"
READY, OUTPUTS, REPLY, DEAD = b"ready", b"outputs", b"reply", b"dead"

CoreProcessHandle = subprocess.Popen[bytes]

_END_SECONDS = 1.0

_DEFAULTS = {"GOMP_SPINCOUNT": "10000"}
"""Of the core's environment. OpenMP's threads wait for one another by spinning, by default for some 16 ms. Where
another process, such as the server itself, has taken a core, every operator waits that long: one sequence was decoded
at 4 instead of 48 tokens a second. On quiet cores the shorter wait costs nothing."""


@dataclass(frozen=True)
class CoreStart:
    """What a core process is told first."""

    config: VllmConfig
    folder: str  # of the addresses
    input_address: str
    output_address: str


def start_core() -> CoreProcessHandle:
    """A core process that imports what it needs and waits for `tell_core`. It ends with this process."""
    # A fresh interpreter rather than a fork or a spawn: no thread is copied, and no main module is run again. It sees
    # the modules that this process sees.
    environment = {**_DEFAULTS, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, "-m", "vllm.v1.engine"], stdin=subprocess.PIPE, env=environment)


def tell_core(process: CoreProcessHandle, start: CoreStart) -> None:
    """Let a core begin."""
    assert process.stdin is not None
    # One that died at once is noticed by its exit status.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(pickle.dumps(start))
        process.stdin.flush()


def end_core(process: CoreProcessHandle) -> None:
    """Make sure that the process is gone."""
    if process.poll() is None:
        process.terminate()
        deadline = time.monotonic() + _END_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if process.poll() is None:
            kill_core(process)
        process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def kill_core(process: CoreProcessHandle) -> None:
    """Kill the process and those that it started, whatever they do. Workers end with their core, but one that hangs
    does not notice."""
    pids = _descendants(process.pid)
    process.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those have. None where the system does not tell."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    return [each for child in children for each in (child, *_descendants(child))]
