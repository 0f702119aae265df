"""The parent's side of the engine core's process: start, send, receive, notice that it died or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.utils.packed import ahead
from vllm.v1.engine.core_process import start as core_start
from vllm.v1.engine.core_process.serial import OutputDecoder, encode_request
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest

OutputHandler = Callable[[list[EngineCoreOutput], dict[str, Any]], None]

_STOP_SECONDS = 5.0
_LAST_WORDS_SECONDS = 1.0
_NUM_LOOKS = 20


class HangClock:
    """Decides when a core hangs: it has requests, and has sent nothing for `timeout_seconds` (plus up to a tenth).

    Counts looks instead of reading a clock: while this process is stopped or its loop is busy, it takes no messages.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.seconds_between_looks = timeout_seconds / _NUM_LOOKS
        self._num_messages: int | None = None
        self._num_silent_looks = 0

    def look(self, num_messages: int, has_requests: bool) -> bool:
        """Whether the core hangs. `num_messages`: sent so far; a core sends one after every step, whatever it gave."""
        # Only looks with requests in a row count: a request that came since has waited for less time.
        seen = num_messages if has_requests else None
        is_silent = seen is not None and seen == self._num_messages
        self._num_silent_looks = self._num_silent_looks + 1 if is_silent else 0
        self._num_messages = seen
        return self._num_silent_looks >= _NUM_LOOKS


class CoreClient:
    """A core process, which ends with `close` or with this process. Its `name` is for errors;
    `num_blocks` of KV cache are known once it is ready. Send from the event loop of `receive`."""

    def __init__(self, config: VllmConfig, core: core_start.CoreProcessHandle, name: str = "the engine core") -> None:
        """Have the process start; call `wait_until_ready` next. ValueError: a bad VLLM_ENGINE_HANG_TIMEOUT_S."""
        self._name = name
        self._hang_seconds = envs.engine_hang_timeout_seconds()
        self._folder = tempfile.mkdtemp(prefix="vllm-")
        # Plain sockets: sending never blocks, and the loop watches the receiving socket's descriptor.
        self._context = zmq.Context()
        self._to_core = self._bind(zmq.PUSH, "input")
        self._from_core = self._bind(zmq.PULL, "output")
        self._outputs = OutputDecoder()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._stop_receiving: Callable[[], None] | None = None
        self._cause: str | None = None
        self._hangs = False
        self.num_messages = 0  # received; the core sends one after every step
        self._num_aborts = 0  # messages
        # Which of them named a request last, until the core has read it: outputs on the way are of a dropped request.
        self._aborted: dict[str, int] = {}
        self.dead_error: EngineDeadError | None = None
        self._process = core.process
        self._finalizer = weakref.finalize(self, _close, core, self._folder)
        addresses = self._address("input"), self._address("output")
        start = core_start.CoreStart(config, self._folder, *addresses, program=ahead.program())
        core_start.tell_core(core, start)
        self.num_blocks = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(core_start.ADD, encode_request(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._num_aborts += 1
        self._aborted.update(dict.fromkeys(request_ids, self._num_aborts))
        self._send(core_start.ABORT, msgspec.msgpack.encode(list(request_ids)))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the EngineCore, over msgpack. RuntimeError: the method raised."""
        number = next(self._call_numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(core_start.CALL, msgspec.msgpack.encode((number, method, arguments)))
            return await self._calls[number]
        finally:
            del self._calls[number]

    async def receive(self, handle: OutputHandler, has_requests: Callable[[], bool]) -> None:
        """Call `handle` with every step's outputs and counts until the core dies; one that hangs while `has_requests()`
        is killed. Always ends with EngineDeadError, or with what `handle` raised."""
        loop = asyncio.get_running_loop()
        died = asyncio.Event()
        # A thread waits for the process, so that its death is noticed at once.
        threading.Thread(target=self._watch, args=(loop, died), daemon=True).start()
        descriptor = int(self._from_core.getsockopt(zmq.FD))
        failure: Exception | None = None

        def take() -> None:
            nonlocal failure
            if self._stop_receiving is None:
                return
            try:
                # One at a time, so that other callbacks run in between. The descriptor signals only the first.
                if self._take_message(handle):
                    loop.call_soon(take)
            except Exception as error:
                failure = error
                died.set()

        def stop() -> None:
            if self._stop_receiving is not None:
                self._stop_receiving = None
                loop.remove_reader(descriptor)

        self._stop_receiving = stop
        loop.add_reader(descriptor, take)
        loop.call_soon(take)
        looking = asyncio.create_task(self._look_for_hang(died, has_requests))
        try:
            await died.wait()
            if failure is not None:
                raise failure
            stop()
            # Its last messages may reach the socket after its end is seen.
            deadline = loop.time() + self._last_words_seconds()
            while self._take_message(handle):
                pass
            while self._cause is None and loop.time() < deadline:
                if not self._take_message(handle):
                    await asyncio.sleep(0.005)
            raise self._die()
        finally:
            # A loop that closed around this task takes no more callbacks.
            if not loop.is_closed():
                looking.cancel()
            stop()

    def ask_to_stop(self) -> None:
        """Ask the process to end, without waiting; `close` waits."""
        if self._finalizer.alive and self._process.poll() is None:
            with contextlib.suppress(zmq.ZMQError):
                self._to_core.send_multipart([core_start.STOP], flags=zmq.NOBLOCK)

    def kill(self) -> None:
        """End the process without waiting for its end, when this one is about to end."""
        core_start.kill_core(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End the process: ask it to stop, then kill it."""
        if self._stop_receiving is not None:
            # Before the descriptor is reused for another file. A closed loop raises.
            with contextlib.suppress(RuntimeError):
                self._stop_receiving()
        self.ask_to_stop()
        if self._finalizer.alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        self._finalizer()
        for socket in (self._to_core, self._from_core):
            socket.close(linger=0)
        self._context.term()

    def _take_message(self, handle: OutputHandler) -> bool:
        """Handle the next message; False: there is none."""
        try:
            message = self._from_core.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self.num_messages += 1
        frames = [frame.buffer for frame in message]
        kind = bytes(frames[0])
        if kind == core_start.OUTPUTS:
            outputs, (num_aborts, stats) = self._outputs.decode(frames[1:])
            if self._aborted:
                self._aborted = {name: number for name, number in self._aborted.items() if number > num_aborts}
                outputs = [output for output in outputs if output.request_id not in self._aborted]
            handle(outputs, stats)
        elif kind == core_start.REPLY:
            number, succeeded, result = msgspec.msgpack.decode(frames[1])
            future = self._calls.get(number)
            if future is not None and not future.done():
                if succeeded:
                    future.set_result(result)
                else:
                    future.set_exception(RuntimeError(result))
        elif kind == core_start.DEAD:
            self._cause = bytes(frames[1]).decode()
        return True

    def _send(self, kind: bytes, data: bytes) -> None:
        if self.dead_error is not None:
            raise self.dead_error
        # The queue is unlimited, so only a process that has gone raises Again; `receive` reports that.
        with contextlib.suppress(zmq.Again):
            self._to_core.send_multipart([kind, data], zmq.NOBLOCK)

    async def _look_for_hang(self, died: asyncio.Event, has_requests: Callable[[], bool]) -> None:
        """Wait until the core hangs; then kill it and set `died`."""
        if self._hang_seconds is None:
            return
        clock = HangClock(self._hang_seconds)
        while not clock.look(self.num_messages, has_requests()):
            await asyncio.sleep(clock.seconds_between_looks)
        self._hangs = True
        core_start.kill_core(self._process)
        # Without waiting for its end, which a device driver may delay.
        died.set()

    def _die(self) -> EngineDeadError:
        self.dead_error = EngineDeadError(self._ending())
        # Clients see the message, the engine's log has the traceback.
        self.dead_error.__cause__ = None if self._cause is None else RuntimeError(self._cause)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.dead_error)
        return self.dead_error

    def _ending(self) -> str:
        if self._hangs:
            limit = f"{self._hang_seconds:g} s (VLLM_ENGINE_HANG_TIMEOUT_S)"
            return f"{self._name} hangs: with requests to work on it finished no step for {limit}, and was killed"
        status = self._process.poll()
        ending = f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
        cause = self._cause.strip().splitlines()[-1] if self._cause else "it sent no error"
        return f"{self._name}'s process ended with {ending}: {cause}"

    def _watch(self, loop: asyncio.AbstractEventLoop, died: asyncio.Event) -> None:
        self._process.wait()
        # The loop may be closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(died.set)

    def wait_until_ready(self) -> None:
        """Wait until the engine is ready; EngineDeadError: it could not start, with the cause."""
        is_ready = False
        while True:
            # Ready for use once its input socket is connected, too.
            if is_ready and self._to_core.poll(100, zmq.POLLOUT):
                return
            if self._from_core.poll(0 if is_ready else 100):
                kind, data = self._from_core.recv_multipart()
                if kind == core_start.READY:
                    is_ready, self.num_blocks = True, msgspec.msgpack.decode(data)["num_blocks"]
                else:
                    self._cause = data.decode()
            if self._process.poll() is not None and not self._from_core.poll(int(self._last_words_seconds() * 1000)):
                raise self._die()

    def _last_words_seconds(self) -> float:
        """How long to wait for the cause from a process that has ended: only one that failed by itself sends it."""
        return _LAST_WORDS_SECONDS if self._cause is None and self._process.poll() == 1 else 0

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(self._address(name))
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}"


def _close(core: core_start.CoreProcessHandle, folder: str) -> None:
    core_start.end_core(core)
    shutil.rmtree(folder, ignore_errors=True)
