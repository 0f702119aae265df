"""decisions.py: every way runs, and all of them do the same work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tiny_llm import make_tiny_model


def test_a_row_of_every_way(benchmark_module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    module = benchmark_module("decisions")
    folder = make_tiny_model(tmp_path, max_position_embeddings=8192)
    row = module.measure(module.Ways(str(folder), True), 3, 60, 2, 1)
    assert set(row["seconds"]) == {"decide", "requests", "prefill", "uncached"}
    # The two states, and some seventy tokens of each question; not the state once a question.
    assert 2 * 60 < row["computed"] < 2 * (60 + 3 * 110)
    assert row["prefill_to_decide"] > 0
