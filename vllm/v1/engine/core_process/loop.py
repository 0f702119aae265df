"""The engine core in a process of its own. Its CoreStart comes pickled through stdin, a socket that stays open as long
as the parent lives; messages are multipart, their kind first."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import shutil
import socket
import sys
import threading
import traceback
from typing import Any

import msgspec
import torch
import zmq

from vllm.config import ModelConfig
from vllm.exceptions import EngineDeadError
from vllm.logger import init_logger
from vllm.utils.forked_children import wait_and_fork
from vllm.utils.packed import ahead
from vllm.v1.core.guests import Rest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_process.serial import decode_request, encode_outputs
from vllm.v1.engine.core_process.start import ABORT, ADD, CALL, DEAD, OUTPUTS, READY, REPLY, STOP, CoreStart
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.structured_output.matcher import read_early

logger = init_logger(__name__)

_HEALTH_CHECK_MS = 1000
_MOST_WOKEN = 4096
_MAX_FAILED_STEPS = 3  # in a row; the fault is then the engine's, not a request's


def _read_early(worker: Any, config: ModelConfig) -> None:
    read_early(config)


class RestWithMessages(Rest):
    """A rest that a message ends: it ends also where `messages` has one, which is not taken."""

    def __init__(self, messages: zmq.Socket[bytes]) -> None:
        self._woken_here, self._waking = socket.socketpair()
        for each in (self._woken_here, self._waking):
            each.setblocking(False)
        self._poller = zmq.Poller()
        for source in (messages, self._woken_here):
            self._poller.register(source, zmq.POLLIN)

    def __call__(self, seconds: float) -> None:
        self._poller.poll(round(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            self._woken_here.recv(_MOST_WOKEN)

    def wake(self, _: object = None) -> None:
        # Where so many bytes are there that no more fit, the next rest ends at once, too.
        with contextlib.suppress(OSError):
            self._waking.send(b"\0")


class CoreProcess:
    """The process's loop: take messages, run a step, send its outputs."""

    def __init__(self, start: CoreStart) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._output = self._context.socket(zmq.PUSH)
        for each in (self._input, self._output):
            # No message is dropped at a high-water mark; unsent ones delay the process's end by a second at most.
            each.set_hwm(0)
            each.setsockopt(zmq.LINGER, 1000)
        self._input.connect(start.input_address)
        self._output.connect(start.output_address)
        self._config = start.config
        self._core: EngineCore
        self._num_failed_steps = 0
        self._num_aborts = 0  # messages read

    def run(self) -> int:
        """Serve until told to stop; the process's exit status."""
        try:
            # Grammars are read while the model is, so that no request waits for that.
            read_early(self._config.model_config)
            self._core = EngineCore(self._config)
            self._core.scheduler.rest = RestWithMessages(self._input)
            if self._config.parallel_config.world_size > 1:
                self._core.executor.collective_rpc(_read_early, (self._config.model_config,))
            try:
                self._serve()
            finally:
                self._core.shutdown()
            return 0
        except BaseException:
            cause = traceback.format_exc()
            logger.error("engine core died:\n%s", cause)
            self._send(DEAD, cause.encode())
            return 1
        finally:
            self._input.close()
            self._output.close()
            # Waits until the last messages are out: the interpreter's end does not.
            self._context.term()

    def _serve(self) -> None:
        # These objects live as long as the process: keep the garbage collector from visiting them.
        gc.freeze()
        self._send(READY, msgspec.msgpack.encode({"num_blocks": self._core.executor.num_blocks}))
        while self._take_messages():
            if self._core.has_work():
                self._step()

    def _take_messages(self) -> bool:
        """Handle all messages that have come; wait for one when there is no other work. False: stop."""
        while True:
            busy = self._core.has_work()
            if busy and not self._input.poll(0):
                return True
            while not self._input.poll(_HEALTH_CHECK_MS):
                self._core.check_health()
            kind, *frames = self._input.recv_multipart()
            if kind == STOP:
                return False
            self._handle(kind, frames)

    def _handle(self, kind: bytes, frames: list[bytes]) -> None:
        if kind == ADD:
            request = decode_request(frames[0])
            try:
                self._core.add_request(request)
            except Exception as error:
                if not isinstance(error, ValueError):
                    logger.exception("a request cannot be queued; it ends")
                self._send_outputs([EngineCoreOutput(request.request_id, [], finish_reason="error", error=str(error))])
        elif kind == ABORT:
            self._num_aborts += 1
            self._core.abort_requests(msgspec.msgpack.decode(frames[0]))
            if not self._core.has_work():
                # No step follows that would send the counts.
                self._send_outputs([])
        elif kind == CALL:
            number, method, arguments = msgspec.msgpack.decode(frames[0])
            try:
                reply = msgspec.msgpack.encode((number, True, self._core.call(method, *arguments)))
            except Exception as error:
                reply = msgspec.msgpack.encode((number, False, f"{type(error).__name__}: {error}"))
            self._send(REPLY, reply)

    def _step(self) -> None:
        requests = self._core.scheduler.requests
        before = list(requests)
        try:
            outputs = self._core.step()
            self._num_failed_steps = 0
        except EngineDeadError:
            raise
        except Exception as error:
            self._num_failed_steps += 1
            if self._num_failed_steps >= _MAX_FAILED_STEPS:
                raise
            logger.exception("a step failed; its requests end")
            message = f"the engine's step failed: {type(error).__name__}: {error}"
            lost = [request_id for request_id in before if request_id not in requests]
            outputs = [EngineCoreOutput(each, [], finish_reason="error", error=message) for each in lost]
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        extra = self._num_aborts, self._core.stats()
        # Without copying: a step's arrays do not change after the step.
        self._output.send_multipart([OUTPUTS, *encode_outputs(outputs, extra)], copy=False)

    def _send(self, kind: bytes, *frames: bytes) -> None:
        self._output.send_multipart([kind, *frames])


def _end_with_parent(folder: str) -> None:
    """Exit when stdin ends: the parent has ended. One that was killed has left its folder."""
    with contextlib.suppress(ConnectionError):
        while os.read(0, 4096):
            pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> int:
    """Run a core with the configuration from stdin; the process's exit status."""
    try:
        if not wait_and_fork():
            # The parent ended, or needs no core.
            return 1
        start = pickle.load(sys.stdin.buffer)
    except (EOFError, ConnectionError):
        return 1
    ahead.act_for(start.program)
    threading.Thread(target=_end_with_parent, args=(start.folder,), daemon=True).start()
    num_replicas = start.config.parallel_config.data_parallel_size
    if num_replicas > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(torch.get_num_threads() // num_replicas, 1))
    return CoreProcess(start).run()
