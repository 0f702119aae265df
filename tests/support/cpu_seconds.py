"""A plugin that prints where a run's CPU seconds go: `PYTHONPATH=tests/support pytest -p cpu_seconds tests/server`.

A clock says little on a busy machine. Seconds are those of the processes that run tests and of all their descendants. A
fixture of a module or a session is a row of its own, not a cost of the test that asks for it first. With
`--processes N` each process has fixtures of its own, and rows are their sums.
"""

from __future__ import annotations

import atexit
import os
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_LEAST = 0.5
_parts: Counter[tuple[str, str]] = Counter()
"""Seconds by file, and by test without its parameters or by fixture."""
_inside: list[float] = []
_file = ""
_folder = tempfile.TemporaryDirectory()
"""Has a file of `_parts` from each process that was forked to run tests."""
_known = {os.getpid()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _file
    _file, _, test = item.nodeid.partition("::")
    with _measured(test.partition("[")[0]):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    with _measured(f"{fixturedef.scope}'s {fixturedef.argname}"):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for part in Path(_folder.name).iterdir():
        _parts.update(pickle.loads(part.read_bytes()))
    files: Counter[str] = Counter()
    for (file, _), seconds in _parts.items():
        files[file] += seconds
    terminalreporter.section(f"{files.total():.1f} CPU seconds")
    for file, seconds in files.most_common():
        terminalreporter.write_line(f"{seconds:7.1f} {file}")
        for (of, part), some in _parts.most_common():
            if of == file and some >= _LEAST:
                terminalreporter.write_line(f"{some:15.1f} {part}")


@contextmanager
def _measured(part: str) -> Iterator[None]:
    """Count what happens inside, without what is measured inside of it."""
    if os.getpid() not in _known:
        _known.add(os.getpid())
        atexit.register(_keep)
    before = _seconds()
    _inside.append(0.0)
    try:
        yield
    finally:
        whole = _seconds() - before
        _parts[_file, part] += whole - _inside.pop()
        if _inside:
            _inside[-1] += whole


def _keep() -> None:
    (Path(_folder.name) / str(os.getpid())).write_bytes(pickle.dumps(_parts))


def _seconds() -> float:
    """CPU seconds of this process and its descendants, those that have ended among them."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system + _by_descendants("self")


def _by_descendants(pid: str) -> float:
    found = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                found += sum(map(int, fields[11:15])) / _TICKS + _by_descendants(child)
        except OSError:  # one has ended since
            continue
    return found
