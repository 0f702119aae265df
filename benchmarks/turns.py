"""Engines working in turns, one at a time, while the others are loaded and stopped."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from common import say
from engines import Engine, EngineError, EngineProcess
from workloads import WORK_ROWS

# An engine whose start takes longer is started only twice, once to warm up and once to measure.
_SLOW_START_SECONDS = 60.0
_FIRST_PAIR = 1000  # beyond the rows' own repeats, so that the pairs' prompts are fresh


class Turns:
    """The started engines and their measurements. The order of the engines alternates from repeat to repeat.

    Attributes:
        processes: by engine name, those that still run.
        engines: name -> version and notes.
        rows: row -> {"unit", "engines": name -> {"values", "seconds", "cpu_seconds", "check", "peak_mib"}}; values in
            the row's unit, and lists by repeat.
        failures: what could not be measured.
    """

    def __init__(self, stack: contextlib.ExitStack, scale: float, logs: Path) -> None:
        self.processes: dict[str, EngineProcess] = {}
        self.engines: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self._stack = stack
        self._scale = scale
        self._logs = logs

    def start(self, engines: list[Engine], repeats: int) -> None:
        """Start every engine and keep it; a peer that does not start is a failure. With repeats, each starts several
        times to fill the row `startup`, after a round that fills the caches of files and compiled code.

        Raises:
            EngineError: the first engine does not start.
        """
        if repeats:
            self.rows["startup"] = {"unit": "s", "engines": {}}
        pending, rounds = list(engines), 0
        while pending:
            for engine in pending[:: -1 if rounds % 2 else 1]:
                say(f"start {engine.name}")
                try:
                    process = EngineProcess(engine, self._logs)
                except EngineError as error:
                    if engine is engines[0]:
                        raise
                    say(str(error))
                    self.failures.append(f"{engine.name} did not start: {_last_line(error)}")
                    pending.remove(engine)
                    continue
                say(f"  {process.startup_seconds:.2f} s")
                if repeats and rounds:
                    self._add_start(engine.name, process)
                wanted = min(repeats, 1) if process.startup_seconds > _SLOW_START_SECONDS else repeats
                if rounds < wanted:
                    process.close()
                    continue
                pending.remove(engine)
                self.processes[engine.name] = self._stack.enter_context(process)
            rounds += 1
        for name in (engine.name for engine in engines if engine.name in self.processes):
            hello = self.processes[name].hello
            self.engines[name] = {"version": hello["version"], "notes": hello["notes"]}

    def measure_row(self, row: str, repeats: int) -> None:
        """Do the row's work with every engine, once to warm up and then `repeats` times."""
        failed: set[str] = set()
        for repeat in range(-1, repeats):
            digests = set()
            for name in list(self.processes)[:: -1 if repeat % 2 else 1]:
                if name in failed:
                    continue
                try:
                    answer = self._turn(name, row, repeat)
                except EngineError as error:
                    failed.add(name)
                    self._drop(row, name, error)
                    continue
                digests.add(answer["digest"])
                self._add(row, name, repeat, answer)
            if len(digests) > 1:
                raise RuntimeError(f"{row}: the engines were given different prompts")

    def pair(self, name: str, first: str, second: str, count: int) -> list[float]:
        """One engine's seconds of the row `second` over those of `first`, in pairs of runs in alternating order."""
        ratios = []
        for number in range(count):
            order = (first, second) if number % 2 == 0 else (second, first)
            seconds = {row: self._turn(name, row, _FIRST_PAIR + number)["seconds"] for row in order}
            ratios.append(seconds[second] / seconds[first])
            say(f"pair {number + 1}: {ratios[-1]:.3f}")
        return ratios

    def add_peak_memory(self) -> None:
        """Fill the row `peak_memory`: each engine's peak over the rows that all of them did, without `fullvocab`, which
        would be the peak of some engines at work that is better done otherwise."""
        shared = [
            self.rows[row]["engines"]
            for row in WORK_ROWS
            if row != "fullvocab" and len(self.rows.get(row, {}).get("engines", ())) == len(self.engines)
        ]
        if shared:
            peaks = {name: {"values": [max(cells[name]["peak_mib"] for cells in shared)]} for name in self.engines}
            self.rows["peak_memory"] = {"unit": "MiB", "engines": peaks}

    def _turn(self, name: str, row: str, repeat: int) -> dict[str, Any]:
        answer = self.processes[name].measure(row, repeat, self._scale)
        say(f"{row} {'warm-up' if repeat < 0 else repeat}: {name} {answer['seconds']:.2f} s")
        return answer

    def _add_start(self, name: str, process: EngineProcess) -> None:
        score = process.hello["score"]
        blank: dict[str, Any] = {"values": [], "seconds": [], "check": sum(score) / len(score)}
        cell = self.rows["startup"]["engines"].setdefault(name, blank)
        cell["values"].append(process.startup_seconds)
        cell["seconds"].append(process.startup_seconds)

    def _add(self, row: str, name: str, repeat: int, answer: dict[str, Any]) -> None:
        cells = self.rows.setdefault(row, {"unit": answer["unit"], "engines": {}})["engines"]
        blank = {"values": [], "seconds": [], "cpu_seconds": [], "check": None, "peak_mib": 0.0}
        cell = cells.setdefault(name, blank)
        cell["peak_mib"] = max(cell["peak_mib"], answer["peak_mib"])
        if repeat < 0:
            return
        cell["values"].append(answer["amount"] / answer["seconds"])
        cell["seconds"].append(answer["seconds"])
        cell["cpu_seconds"].append(answer["cpu_seconds"])
        if repeat == 0:
            cell["check"] = answer["check"]

    def _drop(self, row: str, name: str, error: EngineError) -> None:
        say(str(error))
        self.failures.append(f"{name} could not do {row}: {_last_line(error)}")
        if row in self.rows:
            self.rows[row]["engines"].pop(name, None)
        if not self.processes[name].alive:
            del self.processes[name]


def _last_line(error: EngineError) -> str:
    return str(error).strip().splitlines()[-1]
