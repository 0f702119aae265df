"""Engines as processes: each in its own environment, alive and waiting while the others work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from process_tree import cpu_seconds, peak_mib, reset_peak
from workloads import EngineOptions

_PROGRAM = Path(__file__).resolve().parent / "engine_process.py"


class EngineError(RuntimeError):
    """An engine's process ended, or could not do a row."""


@dataclass(frozen=True)
class Engine:
    """One column of the tables.

    Attributes:
        name: as the tables call it.
        python: interpreter of its environment.
        options: what its process is started with.
    """

    name: str
    python: str
    options: EngineOptions


class EngineProcess:
    """A started engine. Used as a context manager, it ends with the context.

    Attributes:
        engine: what was started.
        startup_seconds: from before the process was made until its first score was here.
        hello: its first message: version, notes, the first score, ours' model shape.
    """

    def __init__(self, engine: Engine, logs: Path) -> None:
        """Start it and wait for its first score.

        Args:
            engine: what to start.
            logs: folder that what it says on the way goes to, in a file of its name.

        Raises:
            EngineError: it ended without a score; the message has the end of its log.
        """
        self.engine = engine
        self._log = logs / f"{engine.name}.log"
        environment = dict(os.environ)
        if engine.options.kind != "ours":
            # A path to this checkout would make its vllm that of every environment.
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
                # A group of its own: what the engine starts ends with it.
                start_new_session=True,
            )
        try:
            self.hello = self._answer()
        except BaseException:
            self.close(timeout=0)
            raise
        self.startup_seconds = time.perf_counter() - began

    def measure(self, row: str, repeat: int, scale: float) -> dict[str, Any]:
        """Do a row's work once.

        Returns:
            seconds, amount, unit, check and digest as the process says; cpu_seconds and peak_mib of its tree.

        Raises:
            EngineError: the row failed, or the process ended.
        """
        assert self._process.stdin is not None
        reset_peak(self._process.pid)
        before = self.cpu_seconds()
        try:
            print(json.dumps({"row": row, "repeat": repeat, "scale": scale}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineError(f"{self.engine.name} has ended:\n{self._end_of_log()}") from None
        answer = self._answer()
        if "error" in answer:
            raise EngineError(f"{self.engine.name}, {row}: {answer['error']}")
        spent = {"cpu_seconds": self.cpu_seconds() - before, "peak_mib": peak_mib(self._process.pid)}
        return {**answer, **spent}

    def cpu_seconds(self) -> float:
        """Processor time of the process and all that it started, so far."""
        return cpu_seconds(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def close(self, timeout: float = 30.0) -> None:
        """End the process and all that it started: its input's end tells it, a signal does after `timeout` seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise EngineError(f"{self.engine.name} ended with {self._process.returncode}:\n{self._end_of_log()}")
        return json.loads(line)

    def _end_of_log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:]


def find_python(environment: str) -> str:
    """The interpreter of a virtual environment's folder, or the interpreter itself.

    Raises:
        ValueError: there is none.
    """
    path = Path(environment).expanduser()
    python = path / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK):
        raise ValueError(f"no python in {environment!r}: give a virtual environment's folder, or an interpreter")
    # Not resolved: a virtual environment is where its link to the interpreter lies.
    return str(python.absolute())
