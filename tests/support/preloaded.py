"""Processes of Python that are forked from one which has imported torch, instead of importing it anew.

Servers, engine cores and workers of the tests start so, which saves each two seconds of computing. `install` replaces
`subprocess.Popen` for `python -m` with _MODULES, and for `python -c` with code that begins with FORKED. Their processes
are what fresh interpreters would be: children of their starter, with the environment, folder, descriptors, signals and
process group that `Popen` was asked for. Commands of other kinds, and of an environment that libraries read when they
are imported, are fresh ones.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, TextIO, TypedDict

from processes import SPARE, set_name

FORKED = "# forked\n"
_SERVERS = (("-m", "vllm.cli.main", "serve"), ("-m", "vllm.entrypoints.openai.api_server"))
_CORE = ("-m", "vllm.v1.engine")
_MODULES = (*_SERVERS, _CORE, ("-m", "vllm.v1.executor"), ("-c", FORKED))
# Imports of those: libraries, and modules of this package, which read the logger's variables alone at once.
_IMPORTED = (
    *("vllm", "torch", "httptools", "uvloop", "uvicorn.protocols.http.httptools_impl", "safetensors.torch"),
    *("jinja2.sandbox", "llguidance", "transformers.tokenization_utils_tokenizers"),
    *("vllm.cli.serve", "vllm.server.launcher", "vllm.server.app", "vllm.v1.engine.core_process.loop"),
    *(f"vllm.server.serving.{each}" for each in ("invocations", "generation.render", "messages.messages")),
    *(f"vllm.server.serving.{each}" for each in ("responses.conversations", "pooling.rerank", "labels.decisions")),
)
# Variables that interpreters and libraries read at once.
_READ_EARLY = ("HF_", "TRANSFORMERS_", "PYTHON", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "KMP_", "LC_", "LANG", "LD_")
_SUBREAPER, _NUM_BYTES, _HIGH, _SECONDS = 36, 1 << 20, 256, 180.0
_NAME = "python"
_libc = ctypes.CDLL(None)


class _Request(TypedDict):
    arguments: list[str]  # after `python`
    environment: dict[str, str]
    folder: str
    targets: list[int]  # the number that each descriptor beside the request shall have
    group: int | None  # the process group; None = a session of its own
    blocked: list[int]  # signals
    prepare: Callable[[], None] | None


def install() -> None:
    """Have this process's commands forked, by a process that starts with the first of them."""
    sources: list[socket.socket] = []

    def source() -> socket.socket:
        if not sources:
            ours, theirs = _pair()
            command = [sys.executable, __file__, str(theirs.fileno())]
            environment = {**os.environ, "VLLM_CONFIGURE_LOGGING": "0"}
            process = fresh(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
            theirs.close()
            ours.settimeout(_SECONDS)
            sources.append(ours)
            atexit.register(_end, process, ours)
        return sources[0]

    fresh = _replace_popen(_MODULES, source)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.wait()


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _replace_popen(modules: tuple[tuple[str, ...], ...], source: Callable[[], socket.socket | None]) -> Any:
    """Send commands to whom `source` names, if anybody. The class that starts all others."""
    fresh: Any = subprocess.Popen
    signature = inspect.signature(fresh._execute_child)
    lock = threading.Lock()
    before = _read_early(os.environ)

    class Popen(fresh):  # type: ignore[misc]
        def _execute_child(self, *arguments: Any) -> None:
            asked = signature.bind(self, *arguments).arguments
            command, environment = asked["args"], os.environ if asked["env"] is None else asked["env"]
            with lock:
                taken = (
                    isinstance(command, list)
                    and command[0] == sys.executable
                    and _begins(command[1:], modules)
                    and _read_early(environment) == before
                )
                connection = source() if taken else None
                if connection is None:
                    super()._execute_child(*arguments)
                    return
                standard = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
                standard = [number if each == -1 else each for number, each in enumerate(standard)]
                passed = list(asked["pass_fds"])
                request: _Request = {
                    "arguments": [os.fspath(each) for each in command[1:]],
                    "environment": dict(environment),
                    "folder": os.fspath(asked["cwd"] or os.getcwd()),
                    "targets": [0, 1, 2, *passed],
                    "group": None if asked.get("start_new_session") else os.getpgid(0),
                    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
                    "prepare": asked["preexec_fn"],
                }
                # Forked by a process between, whose end makes it a child of this one.
                _libc.prctl(_SUBREAPER, 1)
                socket.send_fds(connection, [pickle.dumps(request)], [*standard, *passed])
                answer = connection.recv(32)
                _libc.prctl(_SUBREAPER, 0)
            assert answer, "the process that others are forked from has ended"
            self.pid, self._child_created = int(answer), True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[each] for each in pipes))

    subprocess.Popen = Popen  # type: ignore[misc]
    return fresh


def _begins(arguments: list[str], beginnings: tuple[tuple[str, ...], ...]) -> bool:
    if arguments[:1] == ["-c"]:
        return ("-c", FORKED) in beginnings and arguments[1].startswith(FORKED)
    return any(tuple(arguments[: len(each)]) == each for each in beginnings)


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_EARLY) and name not in ("PYTHONPATH", "PYTHONBREAKPOINT")
    }


def _serve(connection: socket.socket) -> _Request:
    """Fork a process for each request until the other end closes. Comes back in those processes alone."""
    for each in _IMPORTED:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors = _receive(connection)
        if not message:
            os._exit(0)
        if not os.fork():
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            return _become(message, descriptors, connection)
        os.wait()
        for each in descriptors:
            os.close(each)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    message, descriptors, _, _ = socket.recv_fds(connection, _NUM_BYTES, 64)
    return message, descriptors


def _spare() -> _Request | None:
    """A server's first core, forked before the server is anything. Comes back in both: with a request in the core."""
    ours, theirs = _pair()
    set_name(SPARE)
    if os.fork():
        set_name(_NAME)
        theirs.close()
        left = [ours]
        _replace_popen((_CORE,), lambda: left.pop() if left else None)
        return None
    ours.close()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    message, descriptors = _receive(theirs)
    if not message:
        os._exit(0)
    return _become(message, descriptors, theirs)


def _become(message: bytes, descriptors: list[int], connection: socket.socket) -> _Request:
    """Have all that a process inherits as the request says, and tell its starter the process's id."""
    answers, *descriptors = (
        fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH) for each in (connection.detach(), *descriptors)
    )
    os.closerange(3, _HIGH)
    folder = os.path.dirname(__file__)
    own = {folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path.insert(0, folder)
    request: _Request = pickle.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [request["folder"], *path, *(part for part in sys.path if part not in own)]
    sys.argv[1:] = request["arguments"][2:]
    for target, each in zip(request["targets"], descriptors, strict=True):
        os.dup2(each, target)
        os.close(each)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = _writer(1, os.isatty(1), "strict")
    sys.stderr = sys.__stderr__ = _writer(2, True, "backslashreplace")
    if request["group"] is None:
        os.setsid()
    elif os.getpgid(0) != request["group"]:
        os.setpgid(0, request["group"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.modules["numpy"].random.seed()
    set_name(_NAME)
    if request["prepare"] is not None:
        request["prepare"]()
    os.write(answers, str(os.getpid()).encode())
    os.close(answers)
    return request


def _writer(number: int, by_lines: bool, errors: str) -> TextIO:
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    binary = os.fdopen(number, "wb", 0 if at_once else -1, closefd=False)
    return io.TextIOWrapper(binary, errors=errors, line_buffering=by_lines, write_through=at_once)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _begins(request["arguments"], _SERVERS):
        request = _spare() or request
    sys.modules["vllm.logger"].init_logger("vllm")
    kind, what, *_ = request["arguments"]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0], sys.modules["__main__"] = kind, types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    main()
