"""Engines as processes, each in its own environment, and their processor time and memory. Linux only.

An engine that nobody waits for is stopped with its children: OpenMP threads and polling processes spin after their
last work, and would disturb the next engine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from common import status_kib
from workloads import EngineOptions

_PROGRAM = Path(__file__).resolve().parent / "engine_process.py"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class EngineError(RuntimeError):
    """An engine's process ended, or could not do a row."""


@dataclass(frozen=True)
class Engine:
    """An engine to start: its name in the tables, its environment's interpreter, its options."""

    name: str
    python: str
    options: EngineOptions


class EngineProcess:
    """A started engine, stopped while it has nothing to do. It ends with its context.

    Attributes:
        startup_seconds: from the start of the process until its first score.
        startup_cpu_seconds, startup_peak_mib: processor time and memory of its tree until then.
        hello: its first message: version, notes, the first score, our model's shape.
    """

    def __init__(self, engine: Engine, logs: Path, limit: float | None = None) -> None:
        """Start it, with a log in the folder `logs`, and wait for its first score, at most `limit` seconds.

        Raises:
            EngineError: it ended, or the time did, without a score; with the end of its log.
        """
        self.engine = engine
        self._log = logs / f"{engine.name}.log"
        environment = dict(os.environ)
        if engine.options.kind != "ours":
            # A path to this checkout would replace the environment's own vllm.
            environment.pop("PYTHONPATH", None)
        began = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [engine.python, str(_PROGRAM), json.dumps(asdict(engine.options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                preexec_fn=_begin_group,
            )
        try:
            self.hello = self._answer(limit)
            self.startup_seconds = time.perf_counter() - began
            self.startup_cpu_seconds, self.startup_peak_mib = self.cpu_seconds(), peak_mib(self._process.pid)
            rest(self._process.pid)
        except BaseException:
            self.close(timeout=0)
            raise

    def measure(self, row: str, repeat: int, scale: float, limit: float | None = None) -> dict[str, Any]:
        """Do a row's work once: the process's seconds, amount, unit, check and digest; cpu_seconds and peak_mib of its
        tree.

        Raises:
            EngineError: the row failed, or the process ended, or took more than `limit` seconds and was ended.
        """
        assert self._process.stdin is not None
        reset_peak(self._process.pid)
        before = self.cpu_seconds()
        wake(self._process.pid)
        try:
            print(json.dumps({"row": row, "repeat": repeat, "scale": scale}), file=self._process.stdin, flush=True)
            answer = self._answer(limit)
        except BrokenPipeError:
            raise EngineError(f"{self.engine.name} has ended:\n{self._end_of_log()}") from None
        finally:
            rest(self._process.pid)
        if "error" in answer:
            raise EngineError(f"{self.engine.name}, {row}: {answer['error']}")
        # A collection of garbage is not the row's work, and takes longer where more modules are loaded.
        cpu = self.cpu_seconds() - before - answer.pop("setup_cpu_seconds", 0.0)
        return {**answer, "cpu_seconds": cpu, "peak_mib": peak_mib(self._process.pid)}

    def cpu_seconds(self) -> float:
        """Processor time so far, with its descendants'."""
        return cpu_seconds(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def close(self, timeout: float = 30.0) -> None:
        """End the process by closing its stdin, after `timeout` seconds by a signal; then its descendants."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        wake(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        _signal(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, limit: float | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        # One line answers one request: none is left in the stream's buffer.
        if not select.select([self._process.stdout], [], [], limit)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise EngineError(f"{self.engine.name} took more than {limit:g} s and was ended:\n{self._end_of_log()}")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise EngineError(f"{self.engine.name} ended with {self._process.returncode}:\n{self._end_of_log()}")
        return json.loads(line)

    def _end_of_log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:]


def rest(group: int) -> None:
    """Stop a group of processes. One that a child of this session leads is ended by the kernel if this process dies."""
    _signal(group, signal.SIGSTOP)


def wake(group: int) -> None:
    """Let a stopped group go on."""
    _signal(group, signal.SIGCONT)


def _begin_group() -> None:
    """A stopped group whose benchmark was killed ends by the system's SIGHUP, which nohup would have it ignore."""
    os.setpgrp()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def find_python(environment: str) -> str:
    """The interpreter of a virtual environment's folder, or the interpreter itself.

    Raises:
        ValueError: there is none.
    """
    path = Path(environment).expanduser()
    python = path / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK):
        raise ValueError(f"no python in {environment!r}: give a virtual environment's folder, or an interpreter")
    # Not resolved: a virtual environment is found by the link to its interpreter.
    return str(python.absolute())


def process_tree(pid: int) -> list[int]:
    """The process and its living descendants."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        found.append(parent)
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                queue += map(int, (thread / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of the tree's living processes and of the ended children that they waited for."""
    total = 0
    for member in process_tree(pid):
        with contextlib.suppress(OSError):
            # After the name, which may contain spaces: fields 14 to 17 are utime, stime, cutime, cstime.
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / _TICKS_PER_SECOND


def reset_peak(pid: int) -> None:
    """Reset the peak memory of each process of the tree."""
    for member in process_tree(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{member}/clear_refs").write_text("5")


def peak_mib(pid: int) -> float:
    """Peak memory of the tree in MiB: the peak of its largest process and the anonymous memory of the others, as file
    mappings are mostly shared libraries. Exact for one process, a lower bound for several."""
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
