"""Engines as processes: each in its own environment, alive and waiting while the others work."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from adapters import EngineOptions
from process_tree import cpu_seconds, peak_mib, reset_peak

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

    def __init__(self, engine: Engine) -> None:
        """Start it and wait for its first score.

        Raises:
            EngineError: it ended without one; the message has the end of its error output.
        """
        self.engine = engine
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        environment = dict(os.environ)
        if engine.options.kind != "ours":
            # A path to this checkout would make its vllm that of every environment.
            environment.pop("PYTHONPATH", None)
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [engine.python, str(_PROGRAM), json.dumps(asdict(engine.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        try:
            self.hello = self._answer()
        except BaseException:
            self.close()
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
            raise EngineError(f"{self.engine.name} has ended:\n{self._last_errors()}") from None
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

    def close(self) -> None:
        """End the process: its input's end tells it, a signal does if it takes too long."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

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
            raise EngineError(f"{self.engine.name} ended with {self._process.returncode}:\n{self._last_errors()}")
        return json.loads(line)

    def _last_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:]


def find_python(environment: str) -> str:
    """The interpreter of a virtual environment's folder, or the interpreter itself.

    Raises:
        ValueError: there is none.
    """
    path = Path(environment).expanduser()
    python = path / "bin" / "python" if path.is_dir() else path
    if not os.access(python, os.X_OK):
        raise ValueError(f"no python in {environment!r}: give a virtual environment's folder, or an interpreter")
    return str(python.absolute())
