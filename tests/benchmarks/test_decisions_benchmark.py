"""decisions.py: every way runs, and all of them do the same work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tiny_llm import make_tiny_model


@pytest.mark.parametrize("served", [False, True])
def test_a_row_of_every_way(benchmark_module: Callable[[str], ModuleType], tmp_path: Path, served: bool) -> None:
    module = benchmark_module("decisions")
    folder = str(make_tiny_model(tmp_path, max_position_embeddings=8192))
    context = module.served_ways(folder) if served else contextlib.nullcontext(module.OfflineWays(folder, True))
    with context as ways:
        row = module.measure(ways, 3, 60, 2, 1)
    assert set(row["seconds"]) == {"decide", "requests", "prefill"} | ({"uncached"} if not served else set())
    # The two states, and some seventy tokens of each question; not the state once a question.
    assert 2 * 60 < row["computed"] < 2 * (60 + 3 * 110)
    assert row["prefill_to_decide"] > 0
