"""A request's results do not depend on the composition of its batch, also without VLLM_BATCH_INVARIANT."""

from __future__ import annotations

import pytest
from byte_tokenizer import VOCAB_SIZE
from models_util import random_prompts
from readings_reference import assert_same_readings
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.selftest.invariance import InvarianceTest


@pytest.mark.parametrize(
    ("dtype", "gemm"),
    [("float32", ""), ("bfloat16", ""), ("bfloat16", "packed_f32"), ("bfloat16", "packed_bf16_dot")],
)
def test_requests_of_every_kind_in_any_batch(dtype, gemm, tmp_path, monkeypatch):
    """Alone, with others, chunked, cached, preempted: the same bits, which holds ranks and tokens, too."""
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setenv("VLLM_CPU_GEMM", gemm)
    llm = make_tiny_llm(make_tiny_model(tmp_path), dtype=dtype, max_logprob_token_ids=-1)
    checks = {check.name: check for check in InvarianceTest(llm.llm_engine).run()}
    assert {"batch composition 3", "steps of 3 tokens", "every block cached", "preempted"} <= set(checks)
    assert [check for check in checks.values() if not check.passed] == []


def test_rows_of_one_kind_with_others_between(tmp_path):
    """Rows of one kind are read together; each request gets its own readings."""
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
