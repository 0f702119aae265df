"""Processes with time limits, whose hang or death does not end the run; their earlier results are kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The package, the benchmarks' modules, and the tests' tolerances with what they import.
_IMPORTABLE = (ROOT, ROOT / "benchmarks", ROOT / "tests" / "ops", ROOT / "tests" / "support")
_POLL_SECONDS = 0.2
# More than any case needs, its compilations included; less than any part's share of the time.
_CASE_SECONDS = 100.0
_MAX_STARTS = 8
# Exit status of a process that has to be replaced by a new one.
RESTART = 75
# Name of the failed case if a part could not begin.
START = "(start)"


class Process:
    """A command in a process group of its own.

    Args:
        environment: variables beside this process's own.
        output: for its stdout and stderr; default: this process's stderr.
    """

    def __init__(self, command: list[str], environment: dict[str, str], output: Any = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdout=output or sys.stderr,
            stderr=subprocess.STDOUT if output else None,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def wait(self, deadline: float, may_go_on: Callable[[], bool] = lambda: True) -> int | None:
        """The exit status; None if it was killed because `deadline` (time.monotonic) passed or `may_go_on`, which is
        polled, returned False."""
        try:
            while time.monotonic() < deadline and may_go_on():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self._process.wait(_POLL_SECONDS)
        finally:
            self.kill()
        return None

    def kill(self) -> None:
        """Kill the process and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_part(
    part: str,
    options: dict[str, Any],
    environment: dict[str, str],
    deadline: float,
    cases: dict[str, Any],
    tell: Callable[[], None],
) -> None:
    """Run a part's cases in a process; after a death or hang, the remaining ones in another.

    Args:
        options: for child.py; "folder" is where its events are written.
        deadline: of the whole part, in time.monotonic's seconds.
        cases: name -> {"result" or "error", "seconds"}, filled here. A part that was not finished has an entry
            "(rest)".
        tell: called after every change of `cases`.
    """
    events = Events(Path(options["folder"]) / f"{part}.events", cases, tell)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, _IMPORTABLE))}
    for _ in range(_MAX_STARTS):
        argument = json.dumps({**options, "part": part, "events": str(events.path), "done": list(cases)})
        status = Process([sys.executable, "-m", "gpu.child", argument], paths | environment).wait(deadline, events.read)
        events.read()
        if status == 0:
            return
        if events.running:
            events.fail("took too long" if status is None else f"ended its process with status {status}")
        elif status != RESTART:
            break
        if time.monotonic() >= deadline:
            break
    cases["(rest)"] = {"error": "not run: " + ("out of time" if time.monotonic() >= deadline else "no process left")}
    tell()


class Events:
    """Events of the processes of a part: see child.py."""

    def __init__(self, path: Path, cases: dict[str, Any], tell: Callable[[], None]) -> None:
        self.path = path
        self.running = ""
        self._since = 0.0
        self._cases = cases
        self._tell = tell
        self._num_read = 0
        path.write_text("", encoding="utf-8")

    def read(self) -> bool:
        """Read new events; whether the running case may continue."""
        lines = self.path.read_text(encoding="utf-8").split("\n")[self._num_read : -1]
        self._num_read += len(lines)
        for event in map(json.loads, lines):
            self.running = event.get("began", "")
            self._since = time.monotonic()
            if "case" in event:
                self._cases[event.pop("case")] = event
        if lines:
            self._tell()
        return not self.running or time.monotonic() - self._since < _CASE_SECONDS

    def fail(self, reason: str) -> None:
        """Record the running case as failed."""
        self._cases[self.running] = {"error": reason, "seconds": time.monotonic() - self._since}
        self.running = ""
        self._tell()
