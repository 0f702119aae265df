"""The GPU check where there is none: each case at tiny sizes, and what becomes of cases that fail, hang or die."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
Import = Callable[[str], ModuleType]
# Names of rows that have a target: those of the table in docs/performance.md.
ROWS = {
    "kernels": {"fp8_linear"},
    "readings": {
        *(f"readings_{dtype}{against}" for dtype in ("fp32", "bf16") for against in ("", "_torch", "_passes")),
        "prompt_readings",
        "prompt_readings_memory",
        "teacher_ranked",
        "teacher_rankless",
        "prompt_against_output",
        "top_p",
        "swap_blocks",
    },
    "attention": {"prefill_paged", "decode_paged", "decode_float8"},
    "engine": {"prompts_as_outputs", "late_compilations", "decode_ids", "generate_2", "generate_3"},
}


@pytest.fixture
def check_module(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> Import:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "ops"))
    return benchmark_module


@pytest.mark.parametrize("part", ["card", *ROWS])
def test_every_case_runs_at_tiny_sizes(part: str, check_module: Import, tmp_path: Path) -> None:
    setting = check_module("gpu.setting").Setting(
        torch.device("cpu"),
        check_module("gpu.sizes").TINY,
        5,
        tmp_path,
        {"copy_bytes_per_second": 1e9, "matrix_flops_per_second": 1e9},
    )
    cases = check_module(check_module("gpu.child").PARTS[part]).make_cases(setting)
    results = {name: case() for name, case in cases.items()}
    json.dumps(results)
    rows = [row for result in results.values() for row in result.get("rows", ())]
    assert {row["row"] for row in rows} == ROWS.get(part, set())
    for row in rows:
        assert row["target"] is not None
        assert row["value"] > 0 or row["row"] in (
            "prompt_readings_memory",
            "prompt_against_output",
            "prompts_as_outputs",
            "late_compilations",
        )


def test_a_kernel_that_is_wrong_is_found(check_module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = check_module("gpu.kernels")
    setting = check_module("gpu.setting").Setting(torch.device("cpu"), check_module("gpu.sizes").TINY, 5, tmp_path, {})
    right = kernels.gate_and_mul
    monkeypatch.setattr(kernels, "gate_and_mul", lambda x, activation: right(x, activation) * (1 + 1e-4))
    with pytest.raises(AssertionError, match="off by"):
        kernels.make_cases(setting)["gate_and_mul 0.6B float32"]()


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "check.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--device", "cpu", "--scale", "tiny", "--parts", "card"]
    done = subprocess.run([*command, "--output", output], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(output.read_text())
    assert set(result["parts"]["card"]) == {"facts", "copy", "matrix", "host"}
    assert "Copy bandwidth" in done.stdout
    assert str(tmp_path) not in done.stdout
    report = [sys.executable, "benchmarks/gpu_check.py", "--from", output, "--docs"]
    refused = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "on a GPU at full scale" in refused.stderr


@pytest.mark.parametrize(("asked", "parts"), [("readings", ["card", "readings"]), ("kernels", ["kernels"])])
def test_shares_of_bandwidth_measure_the_card(
    asked: str, parts: list[str], benchmark_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--parts", asked])
    assert benchmark_module("gpu_check")._parse_args().parts == parts


def test_every_part_finds_its_modules(benchmark_module: Import, tmp_path: Path) -> None:
    """In a process that has the paths it is given, and none that a test adds."""
    paths = os.pathsep.join(map(str, benchmark_module("gpu.supervise")._IMPORTABLE))
    command = [sys.executable, "-c", f"import {', '.join(benchmark_module('gpu.child').PARTS.values())}"]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class FakeCuda(SimpleNamespace):
    """As much of torch.cuda as timing takes. Work, which adds to `clock`, is done when it is replayed, not captured."""

    def __init__(self, can_capture: bool) -> None:
        super().__init__(clock=0.0, streams=[], can_capture=can_capture, capturing=False)

    def work(self, seconds: float) -> None:
        if self.capturing:
            self.captured += seconds
        else:
            self.clock += seconds

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        if not self.can_capture:
            raise RuntimeError("not permitted when stream is capturing")
        self.capturing, self.captured = True, 0.0
        yield
        self.capturing, seconds = False, self.captured
        graph.replay = lambda: self.work(seconds)

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace(synchronize=lambda: None, at=None)
        event.record = lambda: setattr(event, "at", self.clock)
        event.elapsed_time = lambda end: 1000 * (end.at - event.at)
        return event

    def Stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=self.streams.append)

    current_stream = Stream
    CUDAGraph = SimpleNamespace

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass

    def set_stream(self, stream: Any) -> None:
        self.restored = stream


@pytest.mark.parametrize("can_capture", [True, False])
def test_timing_on_a_stream(can_capture: bool, benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = benchmark_module("gpu.timing")
    cuda = FakeCuda(can_capture)
    monkeypatch.setattr(timing, "_flush_cache", lambda: cuda.work(50.0))
    monkeypatch.setattr(torch, "cuda", cuda)
    calls = {"one": [lambda: cuda.work(2.0)], "three": [lambda: cuda.work(3.0), lambda: cuda.work(5.0)]}
    seconds = timing.time_in_turns(calls, torch.device("cuda"), 3)
    assert seconds == pytest.approx({"one": 2.0, "three": 4.0})
    assert hasattr(cuda, "restored") is not can_capture


CHILD = """
import json, os, sys, time
options = json.loads(sys.argv[1])
with open(options["events"], "a") as events:
    def tell(**fields):
        print(json.dumps(fields), file=events, flush=True)
    for name in ("sound", "dies", "hangs", "broken", "last"):
        if name in options["done"]:
            continue
        tell(began=name)
        if name == "dies":
            os._exit(9)
        if name == "hangs":
            time.sleep(60)
        if name == "broken":
            tell(case=name, error="RuntimeError: illegal access", seconds=0)
            sys.exit(75)
        tell(case=name, result={}, seconds=0)
"""


@pytest.fixture
def supervise(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with the child above."""
    module = benchmark_module("gpu.supervise")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "__init__.py").touch()
    (tmp_path / "gpu" / "child.py").write_text(CHILD)
    monkeypatch.setattr(module, "_IMPORTABLE", (tmp_path,))
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.02)
    return module


def run_part(module: ModuleType, folder: Path, seconds: float) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    module.run_part("part", {"folder": str(folder)}, {}, time.monotonic() + seconds, cases, lambda: None)
    return cases


def test_what_fails_hangs_or_dies_costs_its_own_case(
    supervise: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervise, "_CASE_SECONDS", 1.0)
    cases = run_part(supervise, tmp_path, 60)
    assert [name for name, case in cases.items() if "result" in case] == ["sound", "last"]
    assert cases["dies"]["error"] == "ended its process with status 9"
    assert cases["hangs"]["error"] == "took too long"
    assert "illegal access" in cases["broken"]["error"]


def test_a_part_ends_at_its_deadline(supervise: ModuleType, tmp_path: Path) -> None:
    began = time.monotonic()
    cases = run_part(supervise, tmp_path, 1.5)
    assert time.monotonic() - began < 20
    assert cases["hangs"]["error"] == "took too long"
    assert cases["(rest)"]["error"] == "not run: out of time"
    assert "last" not in cases


def make_result(**changes: Any) -> dict[str, Any]:
    row = {"row": "r", "work": "w", "value": 0.5, "target": 0.8, "unit": "x", "at_least": True, "met": False}
    parts = {"card": {"facts": {"result": {"card": "a card"}}}, "engine": {"a": {"result": {"rows": [row]}}}}
    return {"parts": parts | changes, "seconds": 12.0, "seed": 1, "date": "today", "command": "c"}


def test_a_missed_target_is_no_failure_and_a_failure_is(benchmark_module: Import) -> None:
    tables = benchmark_module("gpu.tables")
    assert tables.missed(make_result()) == ["r"]
    assert tables.failures(make_result()) == []
    assert "| r | w | 0.5x | at least 0.8x | NO |" in tables.make_table(make_result())
    assert "a card" in tables.make_section(make_result())
    broken = make_result(
        kernels={"k": {"error": "Traceback\n  line\nAssertionError: off"}},
        readings={},
        tests={"ok": False, "failed": ["t.py::t"]},
    )
    assert tables.failures(broken) == ["kernels, k: AssertionError: off", "readings: not run", "tests: t.py::t"]


def test_the_page_has_the_bounds_of_the_sizes_measured(benchmark_module: Import) -> None:
    arithmetic, full = benchmark_module("gpu.arithmetic"), benchmark_module("gpu.sizes").FULL
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    replace_section = benchmark_module("report").replace_section
    assert replace_section(page, "gpu bounds", arithmetic.make_table(full, arithmetic.H200)) == page
    assert replace_section(page, "gpu", "") != page
    # The parameters of a known model of this shape, Qwen3-0.6B, less the vectors that scale its norms.
    assert arithmetic.count_parameters(full.shape) == 596_049_920 - 28 * (2 * 1024 + 2 * 128) - 1024
    bounds = {bound.row: bound for bound in arithmetic.make_bounds(full)}
    assert bounds["readings_bf16"].seconds(arithmetic.Rates("one", 1.0, 1.0)) == 256 * 151_936 * 2


def test_tests_for_a_device_need_no_package_that_its_machine_lacks(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = benchmark_module("gpu.suite")
    has = {"numpy", "torch", "triton", "transformers", "pytest", "safetensors", "tokenizers"} | sys.stdlib_module_names
    monkeypatch.setattr(module, "find_spec", lambda name: name if name in has else None)
    files, left_out = module.find_tests(ROOT / "tests")
    assert left_out == {}
    assert {"test_token_readings.py", "test_models.py"} <= {path.name for path in files}


def test_pytest_is_counted(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = benchmark_module("gpu.suite")
    good, bad = tmp_path / "test_good.py", tmp_path / "test_bad.py"
    mark = "import pytest\npytestmark = pytest.mark.gpu\n"
    good.write_text(mark + "@pytest.mark.parametrize('a', ['b c'])\ndef test_good(a): pass\n" + "# long\n" * 9)
    bad.write_text(mark + "def test_bad(): assert 0, 'because'\n")
    monkeypatch.setattr(module, "find_tests", lambda folder: ([bad, good], {}))
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    result = module.Suite(tmp_path, True).finish(time.monotonic() + 120)
    assert (result["ok"], result["counts"], result["statuses"]) == (False, {"PASSED": 1, "FAILED": 1}, [0, 1])
    assert [name.rpartition("::")[2] for name in result["failed"]] == ["test_bad"]
    assert len(result["output"]) == 1 and "because" in result["output"][0]
