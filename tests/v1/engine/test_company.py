"""A request's readings do not depend on its company."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from byte_tokenizer import VOCAB_SIZE
from tiny_llm import make_tiny_llm, make_tiny_model

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


# In bfloat16 the products that round are ours, and add in one order, unless the machine's CPU makes oneDNN the choice.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.0)])
def test_32_requests_in_any_company(dtype, tolerance, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_GEMM", "panels")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    company = importlib.import_module("company")
    folder = make_tiny_model(tmp_path)
    found = {
        difference.way: difference
        for difference in company.measure(
            lambda **fields: make_tiny_llm(folder, dtype=dtype, **fields), VOCAB_SIZE, longest=100
        )
    }
    assert set(found) == {"together", "cached", "shuffled", "preempted", "chunked by 7"}
    for difference in found.values():
        assert (difference.ranks, difference.tokens) == (0, 0), difference
        assert difference.logprob <= tolerance, difference
    assert found["preempted"].preemptions > 0
    assert found["cached"].cached_tokens > found["together"].cached_tokens > 0
