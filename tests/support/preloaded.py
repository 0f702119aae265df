"""Processes of Python that are forked from one which has imported torch, instead of importing it anew.

Commands, engine cores, workers and readers of the tests start so, which saves each two seconds of computing. `install`
replaces `subprocess.Popen` for `python -m` with _MODULES, for `python -c` with code that begins with FORKED, and for
programs in _FOLDERS, also in what was forked. Their processes are what fresh interpreters would be: children of their
starter, with the environment, folder, descriptors, signals, limits, cores and process group that `Popen` was asked for.
Commands of other kinds, and of an environment that libraries read when they are imported, are fresh ones.
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
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypedDict

from processes import SPARE, end_with_parent, set_name

FORKED = "# forked\n"
_WORKER = "vllm.v1.executor"
_MODULES = (
    *("vllm.cli.main", "vllm.entrypoints.openai.api_server", "vllm.v1.engine", _WORKER),
    *("vllm.auditing.reader", "vllm.auditing.second_reader"),
)
_OPTIONS = ("-m", "-c")
_ROOT = Path(__file__).parents[2]
_FOLDERS = tuple(str(_ROOT / each) for each in ("examples", "benchmarks"))
# An interpreter's own, behind this program's folder and PYTHONPATH.
_PATH = sys.path[2:]
# Imports of those: libraries, and modules of this package, which read the logger's variables alone at once.
_IMPORTED = (
    *("vllm", "torch", "httptools", "uvloop", "uvicorn.protocols.http.httptools_impl", "safetensors.torch"),
    *("jinja2.sandbox", "llguidance", "transformers.tokenization_utils_tokenizers"),
    *("vllm.cli.serve", "vllm.server.launcher", "vllm.server.app", "vllm.v1.engine.core_process.loop"),
    *(f"vllm.server.serving.{each}" for each in ("invocations", "generation.render", "messages.messages")),
    *(f"vllm.server.serving.{each}" for each in ("responses.conversations", "pooling.rerank", "labels.decisions")),
)
# Imports of towers of pictures, and of models that run by transformers' modules. They would import Triton, which
# complains at an interpreter's end about objects that were never collected.
_IMPORTED_WITHOUT_TRITON = ("transformers.modeling_utils", "transformers.masking_utils")
# Variables that interpreters and libraries read at once.
_READ_EARLY = ("HF_", "TRANSFORMERS_", "PYTHON", "PYTORCH_", "TORCH_", "OMP_", "MKL_", "KMP_", "LC_", "LANG", "LD_")
_SUBREAPER, _NUM_BYTES, _HIGH, _SECONDS, _NUM_LIMITS = 36, 1 << 20, 256, 180.0, 16
_NAME = "python"
_libc = ctypes.CDLL(None)


class _Request(TypedDict):
    arguments: list[str]  # after `python`
    environment: dict[str, str]
    folder: str
    targets: list[int]  # the number that each descriptor beside the request shall have
    group: int | None  # the process group; None = a session of its own
    blocked: list[int]  # signals
    cores: set[int]
    limits: list[tuple[int, int]]  # by resource
    prepare: Callable[[], None] | None


def install() -> None:
    """Have this process's commands forked, by a process that starts with the first of them."""
    sources: list[socket.socket] = []

    def source() -> socket.socket:
        if not sources:
            ours, theirs = _pair()
            command = [sys.executable, __file__, str(theirs.fileno())]
            environment = {**os.environ, "VLLM_CONFIGURE_LOGGING": "0", "PYTHONPATH": str(_ROOT)}
            process = fresh(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
            theirs.close()
            ours.settimeout(_SECONDS)
            sources.append(ours)
            atexit.register(_end, process, ours)
        return sources[0]

    fresh = _replace_popen(source)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.wait()


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _replace_popen(source: Callable[[], socket.socket]) -> Any:
    """Send commands to the process that `source` names. The class that starts all others."""
    fresh: Any = subprocess.Popen
    signature = inspect.signature(fresh._execute_child)
    lock = threading.Lock()
    before = _read_early(os.environ)

    class Popen(fresh):  # type: ignore[misc]
        def _execute_child(self, *arguments: Any) -> None:
            asked = signature.bind(self, *arguments).arguments
            command, environment = asked["args"], os.environ if asked["env"] is None else asked["env"]
            with lock:
                if not (
                    isinstance(command, list)
                    and command[0] == sys.executable
                    and _is_forked(command[1:])
                    and asked["preexec_fn"] in (None, end_with_parent)
                    and _read_early(environment) == before
                ):
                    super()._execute_child(*arguments)
                    return
                connection = source()
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
                    "cores": os.sched_getaffinity(0),
                    "limits": [resource.getrlimit(each) for each in range(_NUM_LIMITS)],
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


def _is_forked(arguments: list[Any]) -> bool:
    kind, what, *_ = (*arguments, "", "")
    if kind in _OPTIONS:
        return what in _MODULES if kind == "-m" else what.startswith(FORKED)
    return os.path.dirname(kind) in _FOLDERS


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_EARLY) and name not in ("PYTHONPATH", "PYTHONBREAKPOINT")
    }


def _serve(connection: socket.socket) -> _Request:
    """Fork a process for each request until the other end closes. Comes back in those processes alone."""
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
    """Fork the process that this one's children are forked from, before this one is anything. Comes back in both, and
    with a request in the children."""
    ours, theirs = _pair()
    ours.settimeout(_SECONDS)
    set_name(SPARE)
    if os.fork():
        set_name(_NAME)
        theirs.close()
        fresh = _replace_popen(lambda: ours)
        # Two processes cannot ask one: what this one forks itself starts fresh ones.
        os.register_at_fork(after_in_child=lambda: setattr(subprocess, "Popen", fresh))
        return None
    ours.close()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    number = theirs.fileno()
    os.closerange(3, number)
    os.closerange(number + 1, _HIGH)
    return _serve(theirs)


def _become(message: bytes, descriptors: list[int], connection: socket.socket) -> _Request:
    """Have all that a process inherits as the request says, and tell its starter the process's id."""
    answers, *descriptors = (
        fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH) for each in (connection.detach(), *descriptors)
    )
    os.closerange(3, _HIGH)
    sys.path.insert(0, os.path.dirname(__file__))
    request: _Request = pickle.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [request["folder"], *path, *_PATH]
    kind, *others = request["arguments"]
    sys.argv[1:] = others[kind in _OPTIONS :]
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
    os.sched_setaffinity(0, request["cores"])
    for number, limits in enumerate(request["limits"]):
        resource.setrlimit(number, limits)
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
    for each in _IMPORTED:
        importlib.import_module(each)
    sys.modules["triton"] = None  # type: ignore[assignment]
    for each in _IMPORTED_WITHOUT_TRITON:
        importlib.import_module(each)
    del sys.modules["triton"]
    sys.modules["torch.utils._triton"].has_triton_package.cache_clear()
    gc.collect()
    gc.freeze()
    request: _Request | None = _serve(socket.socket(fileno=int(sys.argv[1])))
    # One for each generation: a child of a child has a child.
    while request is not None:
        kind, what, *_ = (*request["arguments"], "")
        request = _spare() if what != _WORKER else None
    sys.modules["vllm.logger"].init_logger("vllm")
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[0], sys.modules["__main__"] = kind, types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path[0] = os.path.dirname(kind)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
