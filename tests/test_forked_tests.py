"""Processes that share a run's files: each test is told once, and a process that dies takes no other test along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked_tests

CONFTEST = """
from forked_tests import ForkedTests

def pytest_configure(config):
    config.pluginmanager.register(ForkedTests(2))
"""
FILES = {
    "test_one.py": """
import os, signal, warnings
import pytest
from forked_tests import shared_folder

@pytest.mark.parametrize("number", range(30))
def test_passes(number, tmp_path, tmp_path_factory, capfd):
    os.write(1, b"hello")
    assert capfd.readouterr().out == "hello"
    (shared_folder(tmp_path_factory) / f"{number}.txt").write_text(str(os.getpid()))
    assert shared_folder(tmp_path_factory) != tmp_path_factory.getbasetemp() in tmp_path.parents

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_goes_on():
    warnings.warn("something odd", stacklevel=1)
""",
    "test_two.py": """
import pytest

@pytest.fixture(scope="session")
def text():
    yield "some"
    print("the end")

def test_skipped(text):
    pytest.skip("no reason")

def test_fails(text):
    print("said before")
    assert text == "none"
""",
}


def run(folder: Path, *more: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(forked_tests.__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", *more]
    command += ["--basetemp", "temporary", "-c", os.devnull, "--rootdir", "."]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_each_test_is_run_and_told_once(tmp_path: Path) -> None:
    status, output = run(tmp_path)
    assert status == 1
    assert "2 failed, 31 passed, 1 skipped, 1 warning in" in output
    assert "FAILED test_one.py::test_dies - the process that ran it ended with -9" in output
    assert "FAILED test_two.py::test_fails - AssertionError" in output and "said before" in output
    assert "UserWarning: something odd" in output
    assert len({path.read_text() for path in (tmp_path / "temporary").glob("*.txt")}) == 1


def test_it_ends_with_the_first_failure(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-x", "-k", "fails")
    assert status == 1 and "stopping after 1 failures" in output and "1 failed" in output


def test_processes_that_end_before_they_take_tests_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("import os, forked_tests\nforked_tests._run = lambda *args: os._exit(1)\n")
    status, output = run(tmp_path, "-p", "plugin")
    assert status == 1 and "34 tests were not run" in output
