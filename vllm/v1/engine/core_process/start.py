"""Starts and ends the engine core's process; names the messages. Has only light imports: the process is started first,
so that it and its parent import the rest at the same time."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.utils.child_signals import starting_child
from vllm.utils.forked_children import ForkedChild, fork_child
from vllm.utils.ray_utils import cluster_address

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Messages to the core, and from it.
ADD, ABORT, CALL, STOP = b"add", b"abort", b"call", b"stop"
READY, OUTPUTS, REPLY, DEAD = b"ready", b"outputs", b"reply", b"dead"

_BEGIN = b"b"  # before the first message; see wait_and_fork


@dataclass(frozen=True)
class CoreStart:
    """The first message to a core process."""

    config: VllmConfig
    folder: str  # of the sockets
    input_address: str
    output_address: str
    program: str  # that starts it; see vllm.utils.packed.ahead


@dataclass(frozen=True)
class CoreProcessHandle:
    """A core's process, and the other end of its stdin, with which it ends."""

    process: subprocess.Popen[bytes] | ForkedChild
    channel: socket.socket


def start_core() -> CoreProcessHandle:
    """A core process that imports what it needs and waits for `tell_core`. It ends with this process."""
    # A fresh interpreter rather than a fork or a spawn of this process: no thread is copied, and no main module is run
    # again.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if level := logging.getLogger("vllm").level:
        environment.setdefault("VLLM_LOGGING_LEVEL", logging.getLevelName(level))
    if (address := cluster_address()) is not None:
        environment.setdefault("RAY_ADDRESS", address)
    command = [sys.executable, "-m", "vllm.v1.engine"]
    ours, theirs = socket.socketpair()
    with theirs, starting_child():
        return CoreProcessHandle(subprocess.Popen(command, stdin=theirs.fileno(), env=environment), ours)


def with_replicas(core: CoreProcessHandle, count: int) -> list[CoreProcessHandle]:
    """`count` cores, of which `core`, which nobody has told anything, is the first. The others are forked from it once
    it has imported what they all need, so that this is in memory once; where that cannot be, they are started."""
    forked = [fork_child(core.channel) for _ in range(count - 1)]
    return [core, *(start_core() if each is None else CoreProcessHandle(*each) for each in forked)]


def tell_core(core: CoreProcessHandle, start: CoreStart) -> None:
    """Send a core its configuration."""
    # A core that died at once is noticed by its exit status.
    with contextlib.suppress(ConnectionError):
        core.channel.sendall(_BEGIN + pickle.dumps(start))


def end_core(core: CoreProcessHandle) -> None:
    """Make sure that the process is gone."""
    if core.process.poll() is None:
        kill_core(core.process)
        core.process.wait()
    core.channel.close()


def kill_core(process: subprocess.Popen[bytes] | ForkedChild) -> None:
    """Kill the process and its descendants: a worker that hangs does not end with its core."""
    pids = _descendants(process.pid)
    process.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """All processes below `pid`; none where the system has no /proc."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text().split())
    return [each for child in children for each in (child, *_descendants(child))]
