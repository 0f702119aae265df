"""Programs that run the engine in their own process: vllm-sbw's watermark, and distilabel."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm import LLM, SamplingParams


def test_vllm_sbw(tiny_model: Path) -> None:
    """Its processor changes what is drawn, and not what is read: readings are raw."""
    processors = pytest.importorskip("vllm_sbw")
    plain = LLM(str(tiny_model), dtype="float32", max_logprobs=-1)
    marked = LLM(str(tiny_model), dtype="float32", max_logprobs=-1, logits_processors=[processors.SBWLogitsProcessor])
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprob_token_ids=[5, 7])
    wanted = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, logprob_token_ids=[5, 7], extra_args={"gamma": 0.5, "delta": 8.0}
    )
    prompt = {"prompt_token_ids": [70, 71, 72, 73, 74, 75]}
    (expected,), (same,), (other,) = (
        llm.generate([prompt], each, use_tqdm=False)
        for llm, each in ((plain, params), (marked, params), (marked, wanted))
    )
    assert other.outputs[0].token_ids != expected.outputs[0].token_ids
    first, read = expected.outputs[0].logprobs[0], other.outputs[0].logprobs[0]
    assert [read[token_id].logprob for token_id in (5, 7)] == pytest.approx(
        [first[i].logprob for i in (5, 7)], abs=1e-6
    )
    assert same.finished


def test_distilabel(tiny_model: Path) -> None:
    models = pytest.importorskip("distilabel.models")
    llm = models.vLLM(model=str(tiny_model), dtype="float32", disable_cuda_device_placement=True)
    llm.load()
    messages = [{"role": "user", "content": "hi"}]
    (result,) = llm.generate_outputs(inputs=[messages], max_new_tokens=4, temperature=0.0, num_generations=1)
    (text,) = result["generations"]
    expected = LLM(str(tiny_model), dtype="float32").chat(messages, SamplingParams(max_tokens=4, temperature=0.0))
    assert text == expected[0].outputs[0].text
    llm.unload()
