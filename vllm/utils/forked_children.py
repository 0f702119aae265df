"""Children of this process that one of its children forks: they share the memory of what that one has imported.

The one that forks has a socket as its stdin and waits for something to read (`wait_and_fork`); its parent asks
(`fork_child`). Linux only, as the parent must adopt what its child forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_FORK = b"f"
_POLL_SECONDS = 0.0002
_adoption = threading.Lock()  # whether this process adopts is one setting of all its threads


class ForkedChild:
    """A child that this process did not start itself; its methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()
        # A signal's handler may kill while the thread that it has interrupted does so.
        self._lock = threading.RLock()
        threading.Thread(target=self._reap, daemon=True).start()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        # While the lock is held the process, be it a zombie, has its id.
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, 9)

    def _reap(self) -> None:
        status = 0
        # Someone who waits for any child may have been told of its end.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with contextlib.suppress(ChildProcessError):
                status = os.waitpid(self.pid, 0)[1]
            self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


def fork_child(channel: socket.socket) -> tuple[ForkedChild, socket.socket] | None:
    """Ask the child behind `channel`, its stdin, for another like it; waits until it listens.

    Returns:
        The new child, which waits as the first one does, and the other end of its stdin. None: there is none, as the
        system adopts no processes, the child has threads, or it has ended.
    """
    ours, theirs = socket.socketpair()
    with _adopting() as adopts:
        # A child that has ended closes the other end, too.
        with theirs, contextlib.suppress(ConnectionError):
            if adopts:
                socket.send_fds(channel, [_FORK], [theirs.fileno()])
        pid = ours.recv(32)
    if not pid:
        ours.close()
        return None
    return ForkedChild(int(pid)), ours


def wait_and_fork() -> bool:
    """Wait until a byte has come through stdin, and take it. Meanwhile this process is forked whenever its parent asks
    for that; this function comes back in each of the processes, with a stdin of its own. False: stdin has ended."""
    while True:
        with socket.socket(fileno=os.dup(0)) as channel:
            data, descriptors, *_ = socket.recv_fds(channel, 1, 1)
        if not descriptors:
            return bool(data)
        # A thread would not be copied, but the locks that it holds. OpenBLAS, unknown to Python, ends its own before.
        if threading.active_count() == 1:
            _fork(*descriptors)
        else:
            os.close(*descriptors)


def _fork(descriptor: int) -> None:
    # A garbage collection writes to all objects that it visits, and what is written to is no longer shared.
    gc.collect()
    gc.freeze()
    # A process between, whose end makes its child one of this one's parent.
    if between := os.fork():
        os.close(descriptor)
        os.waitpid(between, 0)
        return
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(_POLL_SECONDS)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    os.write(0, str(os.getpid()).encode())


@contextlib.contextmanager
def _adopting() -> Iterator[bool]:
    """Have processes below this one become its children when their parents end; False: the system has no such thing."""
    if not sys.platform.startswith("linux"):
        yield False
        return
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    with _adoption:
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        adopts = libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
        try:
            yield adopts
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)
