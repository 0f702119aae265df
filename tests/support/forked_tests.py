"""Several processes that share a run's test files, for `pytest --processes N`.

All is collected once, and then the processes are forked: what some hundred files import and compute when they are
collected is there in each. A process takes the next group of tests when it has done one, in the order of the groups.
Where a process dies, the test that it ran has failed, and another process does what was left.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from file_order import groups_of
from processes import end_with_parent

_NUMBER_BYTES = 4
_FOLDER = "process"


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all processes of the run have in common."""
    folder = factory.getbasetemp()
    return folder.parent if folder.name.startswith(_FOLDER) else folder


class _Worker:
    """A process that runs tests, as the one that collected them knows it."""

    def __init__(self, pid: int, reports: Connection, left: list[int]) -> None:
        self.pid, self.reports = pid, reports
        self.left = left  # numbers of tests that it has taken and not ended, in order


class ForkedTests:
    """A plugin that runs what was collected in `number` processes."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._workers: dict[Connection, _Worker] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        self._session, self._groups = session, groups_of(session.items)
        self._num_left = len(session.items)
        self._folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._queue, numbers = os.pipe()
        os.set_blocking(numbers, False)  # some thousand groups fit
        for number in range(len(self._groups)):
            os.write(numbers, number.to_bytes(_NUMBER_BYTES, "little"))
        os.close(numbers)
        gc.collect()
        gc.freeze()
        try:
            for _ in range(min(self._number, len(self._groups))):
                self._fork([])
            while self._workers:
                for reports in wait(list(self._workers)):
                    self._hear(self._workers[reports])  # type: ignore[index]
                if session.shouldfail or session.shouldstop:
                    raise session.Failed(session.shouldfail or session.shouldstop)
            if self._num_left:
                session.shouldfail = f"{self._num_left} tests were not run"
                raise session.Failed(session.shouldfail)
        finally:
            for worker in self._workers.values():
                os.kill(worker.pid, signal.SIGTERM)
                os.waitpid(worker.pid, 0)
        return True

    def _fork(self, left: list[int]) -> None:
        """Another process, which does what is left of one that died before it takes a group."""
        heard, said = Pipe(duplex=False)
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                end_with_parent()
                atexit._clear()
                for other in self._workers:
                    other.close()
                heard.close()
                _run(self._session, said, self._folder / f"{_FOLDER}{os.getpid()}", self._taken(said, left))
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                atexit._run_exitfuncs()
                os._exit(status)
        said.close()
        self._workers[heard] = _Worker(pid, heard, left)

    def _taken(self, said: Connection, left: list[int]) -> Iterator[pytest.Item]:
        for number in left:
            yield self._session.items[number]
        while taken := os.read(self._queue, _NUMBER_BYTES):
            group = self._groups[int.from_bytes(taken, "little")]
            said.send(("taken", group))
            for number in group:
                yield self._session.items[number]

    def _hear(self, worker: _Worker) -> None:
        hook = self._session.config.hook
        try:
            kind, what = worker.reports.recv()
        except (EOFError, OSError):
            self._end(worker)
            return
        if kind == "taken":
            worker.left = worker.left + what
        elif kind == "warning":
            name, text, filename, line = what.pop("warning")
            category: Any = type(name, (Warning,), {})
            message = warnings.WarningMessage(category(text), category, filename, line)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **what})
        else:
            for data in what:
                hook.pytest_runtest_logreport(
                    report=hook.pytest_report_from_serializable(config=self._session.config, data=data)
                )
            self._num_left -= 1
            worker.left = worker.left[1:]

    def _end(self, worker: _Worker) -> None:
        """A process has ended; where tests were left, the first is what ended it."""
        del self._workers[worker.reports]
        _, status = os.waitpid(worker.pid, 0)
        if worker.left:
            first, *left = worker.left
            item = self._session.items[first]
            said = f"the process that ran it ended with {os.waitstatus_to_exitcode(status)}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
            self._num_left -= 1
            self._fork(left)


class _Said:
    """In a process that runs tests: what happens is sent to the one that collected them."""

    def __init__(self, config: pytest.Config, said: Connection) -> None:
        self._config, self._said = config, said
        self._reports: list[Any] = []  # of the test that runs; each message takes the other process a core's time

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self._said.send(("ended", self._reports))
        self._reports.clear()

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        what = warning_message
        told = (what.category.__name__, str(what.message), what.filename, what.lineno)
        self._said.send(("warning", {"warning": told, "when": when, "nodeid": nodeid, "location": location}))


def _run(session: pytest.Session, said: Connection, folder: Path, items: Iterator[pytest.Item]) -> None:
    """Run the tests in a process that was just forked."""
    random.seed()
    config = session.config
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    manager.unregister(name="junitxml")
    # The files that output goes to are the other processes', too.
    capture: Any = manager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    folder.mkdir()
    manager.register(_Said(config, said))
    for item, following in pairwise(chain(items, [None])):
        assert item is not None
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    with suppress(Exception):
        capture.suspend_global_capture(in_=True)
    said.close()
