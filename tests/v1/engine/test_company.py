"""A request's readings do not depend on its company."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from byte_tokenizer import VOCAB_SIZE
from models_util import random_prompts
from readings_reference import assert_same_readings
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


# In bfloat16 the products that round are ours, and add in one order, unless the CPU makes oneDNN the choice.
@pytest.mark.parametrize(
    ("dtype", "gemm", "tolerance"),
    [("float32", "panels", 1e-5), ("bfloat16", "panels", 0.0), ("bfloat16", "pairs", 0.0)],
)
def test_32_requests_in_any_company(dtype, gemm, tolerance, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_GEMM", gemm)
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


def test_rows_of_one_kind_around_a_stranger(tmp_path):
    """Rows are read together with strangers between them; nobody gets a stranger's readings."""
    llm = make_tiny_llm(make_tiny_model(tmp_path), max_logprob_token_ids=-1)
    entropy = {"logprobs": 1, "logprob_entropy": True}
    few, many = {"logprob_token_ids": [3, 4]}, {"logprob_token_ids": range(200)}
    fields = [entropy, entropy, {}, few, entropy, many, entropy, few, few, {"logprobs": 2}]
    params = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **each) for each in fields]
    prompts = random_prompts(VOCAB_SIZE, (4, 7, 5, 9, 3, 6, 8, 2, 5, 7))
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, own, output in zip(prompts, params, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate([prompt], own, use_tqdm=False)
        assert_same_readings(output, alone, 1e-5)
        if own.logprob_entropy:
            assert [each.entropy for each in output.outputs[0].logprobs] == [
                each.entropy for each in alone.outputs[0].logprobs
            ]
