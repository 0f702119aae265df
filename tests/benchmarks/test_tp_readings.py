"""tp_readings.py: both ways read the same, their bytes are counted, and the script prints table and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from memory_group import run_ranks

Import = Callable[[str], ModuleType]


def test_both_ways_are_compared(benchmark_module: Import) -> None:
    benchmark = benchmark_module("tp_readings")
    rows, vocab_size, ids = 3, 1001, 4
    records = run_ranks(2, lambda group: benchmark.compare(group, rows, vocab_size, ids, repeats=2))
    for record in records:
        assert record["bytes"] == {"slices": rows * (3 + 2 * ids) * 4, "gather": rows * (501 * 4 + 4)}
        assert all(each > 0 for each in record["milliseconds"].values())
        line = benchmark.table_line({"connection": "gloo", **record})
        assert len(line) == len(benchmark.HEAD) and line[:2] == ["gloo", "3"]


def test_the_script(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = benchmark_module("tp_readings")
    record = {"rows": 2, "milliseconds": {"slices": 1.0, "gather": 3.0}, "bytes": {"slices": 10, "gather": 5000}}
    monkeypatch.setattr(benchmark, "measure", lambda name, args: [{"connection": name, **record}])
    monkeypatch.setattr(sys, "argv", ["tp_readings.py", "--batches", "2", "--ids", "5"])
    benchmark.main()
    *table, last = capsys.readouterr().out.splitlines()
    assert table[2:] == [
        f"| {name} | 2 | 1.00 | 3.00 | 3.00 | 10 | 5,000 | 500 |" for name in ("gloo", "shared memory")
    ]
    result = json.loads(last)
    assert result["ids"] == 5 and result["batches"] == [2] and len(result["connections"]) == 2
