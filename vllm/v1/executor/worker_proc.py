"""The process of a worker of rank 1 or above, which runs the calls of rank 0's executor: a byte (STEP, CALL, STOP) and
the pickled (method, args, kwargs). It sends pickled tuples that begin with one of HELLO ... FAILED."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from vllm.config import VllmConfig
from vllm.distributed.communicator import Communicator, PeerLostError
from vllm.distributed.process_group import connect_store, join_group
from vllm.distributed.shared_memory import Links, SharedMemoryCommunicator
from vllm.distributed.stages import ONLY, Stage, StageEnds, connect_ends
from vllm.v1.executor.worker import Worker, call_worker, make_worker, worker_device

# To the worker: a call without a reply, a call whose result is sent back, the end.
STEP, CALL, STOP = b"s", b"c", b"q"

# From the worker: it is about to join the store's group; its Progress; a call's result, or its traceback; its failure:
# the traceback, and whether the loss of another rank was the cause.
HELLO, BEAT, RESULT, RAISED, FAILED = "hello", "beat", "result", "raised", "failed"

BEAT_SECONDS = 1.0
_SHOW_STACK_AFTER_SECONDS = 2.0


@dataclass(frozen=True)
class WorkerStart:
    """The first message to a worker."""

    config: VllmConfig
    rank: int
    world_size: int  # ranks of its stage: rank r is number r % world_size there
    store: tuple[str, int]  # host and port of the store through which the ranks connect
    address: str  # of the worker's machine, where it listens for other ranks
    num_here: int  # ranks on that machine
    parent_pid: int | None  # the process with which it ends, if that is on its machine
    links: Links | None = None  # shared memory between the stage's ranks, in place of the store
    ends: StageEnds = ONLY  # its stage, with connections to this rank's number in its neighbours

    @property
    def number(self) -> int:
        """Its rank in its stage."""
        return self.rank % self.world_size

    @property
    def meets(self) -> bool:
        """Whether it meets others at the store."""
        return self.ends.are_elsewhere or (self.links is None and self.world_size > 1)

    @property
    def store_prefix(self) -> str:
        """The beginning of the keys of its stage's ranks in the store."""
        return f"stage/{self.ends.index}"


@dataclass(frozen=True)
class Progress:
    """State of a rank: its collectives, and its working thread."""

    num_collectives: int = 0  # begun
    cpu_seconds: float = 0.0  # of its working thread
    is_waiting: bool = False  # in a collective, or for its device
    waits_for_device: bool = False
    stack: str | None = None  # of its working thread, if it has been in one call for a while


def thread_clock() -> Callable[[], float]:
    """A clock of the calling thread's CPU seconds that any thread may read."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)


class ReadAhead:
    """A connection over a network whose messages are taken as they come. A long one would otherwise fill the system's
    buffers while a step is computed, and a peer that takes nothing for VLLM_WORKER_LINK_TIMEOUT_S counts as lost."""

    def __init__(self, connection: Connection) -> None:
        self.send_bytes = connection.send_bytes
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._messages.put(connection.recv_bytes())
        self._messages.put(None)

    def recv_bytes(self) -> bytes:
        """The next message. EOFError: none comes any more."""
        message = self._messages.get()
        if message is None:
            raise EOFError
        return message


class WorkerProcess:
    """The worker's side: the thread of `run` works, another one sends its progress."""

    def __init__(self, connection: Connection | ReadAhead, start: WorkerStart) -> None:
        self._connection = connection
        self._start = start
        self._sending = threading.Lock()
        self._group = Communicator()
        self._call_began: float | None = None

    def run(self) -> int:
        """Join the group, then run calls until STOP; the process's exit status."""
        threading.Thread(target=self._beat, args=(thread_clock(), threading.get_ident()), daemon=True).start()
        try:
            worker = self._make_worker()
            while (message := self._receive()) is not None:
                self._obey(worker, message)
            return 0
        except BaseException as error:
            self._send(FAILED, traceback.format_exc(), isinstance(error, PeerLostError))
            return 1

    def _receive(self) -> bytes | None:
        """The next call; None: STOP, or the executor has gone."""
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError):
            return None
        return None if message == STOP else message

    def _make_worker(self) -> Worker:
        start = self._start
        ends, own_store = start.ends, None
        if start.links is not None:
            self._group = SharedMemoryCommunicator(start.links)
        if start.meets:
            self._send(HELLO)
            own_store = connect_store(*start.store, start.world_size)
        if ends.are_elsewhere and own_store is not None:
            ends = connect_ends(ends, own_store, start.number, start.address)
        if start.links is None and start.world_size > 1 and own_store is not None:
            device = worker_device(start.config, start.rank)
            of_stage = dist.PrefixStore(start.store_prefix, own_store)
            custom = not start.config.parallel_config.disable_custom_all_reduce
            self._group = join_group(of_stage, start.number, start.world_size, device, start.address, custom)
        return make_worker(start.config, self._group, Stage(ends, self._group), start.num_here)

    def _obey(self, worker: Worker, message: bytes) -> None:
        self._call_began = time.monotonic()
        is_step = message[:1] == STEP
        try:
            method, args, kwargs = pickle.loads(memoryview(message)[1:])
            result = call_worker(worker, method, args, kwargs)
            if not is_step:
                self._send(RESULT, result)
        except Exception as error:
            if is_step or isinstance(error, PeerLostError):
                raise
            self._send(RAISED, traceback.format_exc())
        self._call_began = None

    def _beat(self, clock: Callable[[], float], thread_id: int) -> None:
        while True:
            parent_pid = self._start.parent_pid
            if parent_pid is not None and os.getppid() != parent_pid:
                os._exit(1)
            began = self._call_began
            stack: str | None = None
            if began is not None and time.monotonic() - began > _SHOW_STACK_AFTER_SECONDS:
                stack = "".join(traceback.format_stack(sys._current_frames()[thread_id]))
            try:
                group = self._group
                waits = group.is_waiting, group.waits_for_device
                self._send(BEAT, Progress(group.total_calls, clock(), *waits, stack))
            except OSError:
                os._exit(1)
            time.sleep(BEAT_SECONDS)

    def _send(self, *message: Any) -> None:
        data = pickle.dumps(message)
        with self._sending:
            self._connection.send_bytes(data)


def main() -> None:
    """Run the worker whose connection's descriptor is the first argument."""
    connection = Connection(int(sys.argv[1]))
    status = 1
    # Without a first message, the parent has gone.
    with contextlib.suppress(EOFError, OSError):
        message = connection.recv_bytes()
        try:
            process = WorkerProcess(connection, pickle.loads(message))
        except Exception:
            # For example a class of the user's main script, which is not imported here.
            connection.send_bytes(pickle.dumps((FAILED, traceback.format_exc(), False)))
        else:
            status = process.run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Neither a library's thread nor connected ranks may keep the process alive.
    os._exit(status)
