"""Watches the workers of ranks 1 and above, and ends all of them when one fails."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from vllm.distributed.communicator import ALONE, PeerLostError
from vllm.distributed.stages import WHOLE
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.v1.executor.worker_proc import BEAT, FAILED, HELLO, RAISED, RESULT, Progress

logger = init_logger(__name__)

START_SECONDS = 300.0  # for a worker to begin
_TICK_SECONDS = 0.5
_SILENCE_SECONDS = 7.0  # without a message: the process hangs
_STALL_SECONDS = 7.0  # without progress of any rank in a step
_COMPUTED_SECONDS = 0.1  # of CPU time within _STALL_SECONDS; less is no progress
_OTHERS_SECONDS = 0.3  # for the others' messages, when one has failed
_WORD_SECONDS = 5.0  # for a worker's message, when rank 0 has lost it or failed in a call that the worker is to answer
_PAUSED_SECONDS = 3.0  # between two looks: this process was stopped
_RELEASE_SECONDS = 30.0  # for rank 0 to go on, once its device's collectives were aborted


class WorkerHandle(Protocol):
    """A worker of rank 1 or above, as rank 0 sees it."""

    rank: int
    connection: Connection

    def ending(self) -> str:
        """A description of how it ended; called when its connection is closed."""

    def end(self, deadline: float) -> None:
        """Wait for its end until `deadline`, on the monotonic clock; then kill it."""

    def kill(self) -> None:
        """End it at once."""


@dataclass
class _Watched:
    """The last known state of a worker."""

    handle: WorkerHandle
    replies: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)
    silent_after: float = field(default_factory=lambda: time.monotonic() + START_SECONDS)
    progress: Progress = field(default_factory=Progress)
    is_connected: bool = True


@dataclass(order=True)
class _Fault:
    """Why a rank failed; the lowest is the one to report."""

    severity: int  # 0: of its own; 1: it ended without a message; 2: because it lost others
    message: str


class WorkerMonitor:
    """A thread that receives the workers' messages. The first fault ends all workers: their connections close, so a
    rank that waits for them in a collective gets an error. `group` and `stage` are rank 0's, once there are any;
    `timeout_seconds` limits the time that a rank computes between two collectives; `link_seconds` is how long nothing
    may come from a worker on another machine, None: they are on this one; `kind` is what messages call them."""

    def __init__(
        self,
        handles: Sequence[WorkerHandle],
        timeout_seconds: float,
        link_seconds: float | None = None,
        kind: str = "tensor-parallel rank",
    ) -> None:
        self.group, self.stage = ALONE, WHOLE
        self._timeout_seconds, self._kind = timeout_seconds, kind
        self._silence_seconds = _SILENCE_SECONDS if link_seconds is None else link_seconds
        self._stall_seconds = _STALL_SECONDS if link_seconds is None else link_seconds
        self._link_limit = "" if link_seconds is None else f" for VLLM_WORKER_LINK_TIMEOUT_S={link_seconds:g}"
        self._watched = {handle.connection: _Watched(handle) for handle in handles}
        self._marks: tuple[list[int], list[float]] = ([], [])
        self._marked_at = self._collective_at = self._looked_at = time.monotonic()
        self._closing = threading.Event()
        self._ending = threading.Lock()
        self._failed = threading.Event()
        self._failure = ""
        self._thread = threading.Thread(target=self._watch, name="vllm-worker-monitor", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises EngineDeadError, with the traceback, when a rank has failed."""
        if self._failed.is_set():
            raise EngineDeadError(self._failure)

    def send(self, kind: bytes, call: bytes) -> None:
        """Send a call to all workers; PeerLostError: one has gone."""
        try:
            for connection in self._watched:
                connection.send_bytes(kind + call)
        except OSError as error:
            raise PeerLostError(f"a worker cannot be sent to: {error}") from error

    def fail(self, error: BaseException) -> EngineDeadError:
        """End all workers because of an error on rank 0; returns the error to raise."""
        if isinstance(error, PeerLostError):
            # The cause is another rank; the thread is about to receive its message.
            self._failed.wait(_WORD_SECONDS)
        self._end(f"{self._kind} 0 failed: {type(error).__name__}: {error}")
        return EngineDeadError(self._failure)

    def replies(self) -> list[Any]:
        """The workers' results of the last call, in the order of ranks. RuntimeError: a call raised (the traceback)."""
        results: list[Any] = []
        raised: list[str] = []
        for watched in self._watched.values():
            kind, value = self._reply(watched)
            results.append(value)
            if kind == RAISED:
                raised.append(f"{self._kind} {watched.handle.rank} raised:\n{value}")
        if raised:
            raise RuntimeError("\n".join(raised))
        return results

    def discard_replies(self) -> None:
        """Take the replies to a call that raised on rank 0. If a worker sends none, it waits: all are ended."""
        deadline = time.monotonic() + _WORD_SECONDS
        for watched in self._watched.values():
            try:
                watched.replies.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                self._end(f"{self._kind} {watched.handle.rank} did not answer a call that raised on rank 0")

    def stop_watching(self) -> None:
        """End the thread, before the workers are asked to stop."""
        self._closing.set()
        self._thread.join()

    def _reply(self, watched: _Watched) -> tuple[str, Any]:
        while True:
            try:
                return watched.replies.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                self.check()

    def _end(self, message: str) -> None:
        with self._ending:
            if not self._failed.is_set():
                self._failure = message
                self._failed.set()
        # A worker that cannot be reached does not hear that it is to end.
        self.group.disconnect()
        self.stage.disconnect()
        for watched in self._watched.values():
            watched.handle.kill()
        if self.group.waits_for_device:
            self._release_device()

    def _release_device(self) -> None:
        """Rank 0 waits for a collective that no rank will complete, and that no exception ends."""
        self.group.abort()
        deadline = time.monotonic() + _RELEASE_SECONDS
        while self.group.waits_for_device:
            if time.monotonic() > deadline:
                logger.error("%s. The device does not come back: the process ends.", self._failure)
                os._exit(1)
            time.sleep(_TICK_SECONDS / 10)

    def _watch(self) -> None:
        while not (self._closing.is_set() or self._failed.is_set()):
            try:
                faults = self._take_messages(_TICK_SECONDS) or self._find_hang()
                if faults and not self._closing.is_set():
                    # A rank that fails takes others along, and their messages may come first.
                    time.sleep(_OTHERS_SECONDS)
                    faults += self._take_messages(0)
                    self._end(min(faults).message)
            except Exception as error:
                self._end(f"a worker's message cannot be read: {type(error).__name__}: {error}")

    def _take_messages(self, timeout: float) -> list[_Fault]:
        """Handle the messages that have come; returns the faults among them."""
        faults: list[_Fault] = []
        connected = [connection for connection, watched in self._watched.items() if watched.is_connected]
        if not connected:
            time.sleep(timeout)
        for connection in wait(connected, timeout):
            watched = self._watched[connection]  # type: ignore[index]
            try:
                while connection.poll():  # type: ignore[union-attr]
                    faults += self._take(watched, *pickle.loads(connection.recv_bytes()))  # type: ignore[union-attr]
            except (EOFError, OSError):
                watched.is_connected = False
                ending = watched.handle.ending()
                faults.append(_Fault(1, f"{self._kind} {watched.handle.rank} has gone: {ending}"))
        return faults

    def _take(self, watched: _Watched, kind: str, *content: Any) -> list[_Fault]:
        watched.silent_after = time.monotonic() + self._silence_seconds
        if kind == BEAT:
            (watched.progress,) = content
        elif kind in (HELLO, RESULT, RAISED):
            watched.replies.put((kind, content[0] if content else None))
        elif kind == FAILED:
            trace, lost_others = content
            return [_Fault(2 * lost_others, f"{self._kind} {watched.handle.rank} failed:\n{trace}")]
        return []

    def _find_hang(self) -> list[_Fault]:
        now = time.monotonic()
        paused = now - self._looked_at > _PAUSED_SECONDS
        self._looked_at = now
        if paused:
            # This process was stopped and has not read the others' messages.
            self._marked_at = self._collective_at = now
            for watched in self._watched.values():
                watched.silent_after = max(watched.silent_after, now + self._silence_seconds)
        silent = [str(each.handle.rank) for each in self._watched.values() if now > each.silent_after]
        if silent:
            what = "cannot be reached or hangs" if self._link_limit else "hangs"
            ranks = ", ".join(silent)
            return [_Fault(0, f"{self._kind} {ranks} {what}: it gives no sign of life{self._link_limit}")]
        return self._find_stall(now)

    def _find_stall(self, now: float) -> list[_Fault]:
        """A fault when rank 0 waits and no other rank makes progress, or the computing ones exceed the time limit."""
        ranks = [watched.progress for watched in self._watched.values()]
        calls = [self.group.total_calls, *(each.num_collectives for each in ranks)]
        clocks = [each.cpu_seconds for each in ranks]
        if not self.group.is_waiting or calls != self._marks[0]:
            self._marks, self._marked_at, self._collective_at = (calls, clocks), now, now
            return []
        computed = (
            clock - before
            for rank, clock, before in zip(ranks, clocks, self._marks[1], strict=True)
            if not rank.is_waiting
        )
        if any(seconds >= _COMPUTED_SECONDS for seconds in computed):
            self._marks, self._marked_at = (calls, clocks), now
        # Whether a device computes is not known.
        may_compute = self.group.waits_for_device and all(each.waits_for_device for each in ranks)
        if now - self._marked_at > self._stall_seconds and not may_compute:
            limit = f"{self._stall_seconds:.0f} s"
            return [_Fault(0, f"the step hangs: no rank has done anything for {limit}{self._where()}")]
        if now - self._collective_at > self._timeout_seconds:
            limit = f"VLLM_WORKER_TIMEOUT_S={self._timeout_seconds:g}"
            return [_Fault(0, f"the step hangs: no rank has got on for {limit}{self._where()}")]
        return []

    def _where(self) -> str:
        """The stacks of the workers that the others wait for."""
        ranks = [(watched.handle.rank, watched.progress) for watched in self._watched.values()]
        behind = [each for each in ranks if not each[1].is_waiting] or ranks
        return "".join(f"\n{self._kind} {rank} is at:\n{progress.stack}" for rank, progress in behind if progress.stack)
