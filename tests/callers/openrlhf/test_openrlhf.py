"""openrlhf's rollout actor: an engine in an actor of ray, which generates, is paused and sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm import LLM, SamplingParams

# The folder of this test is an "openrlhf", too.
pytest.importorskip("openrlhf.trainer.ray")
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A machine that says it has a GPU, which the actor's placement asks for."""
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_rollouts(cluster: None, tiny_model: Path) -> None:
    from openrlhf.trainer.ray import batch_vllm_engine_call, create_vllm_engines
    from transformers import AutoTokenizer

    sizes: dict[str, Any] = {"max_model_len": 512, "seed": 0, "gpu_memory_utilization": 0.5}
    flags = {"full_determinism": False, "enable_prefix_caching": True, "enforce_eager": True}
    engines = create_vllm_engines(
        1, 1, str(tiny_model), **sizes, **flags, vllm_enable_sleep=True, logprobs_mode="processed_logprobs"
    )
    batch_vllm_engine_call(engines, "wake_up")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    (engine,) = engines
    output = ray.get(engine.generate.remote([70, 71, 72], params))
    llm = LLM(str(tiny_model), dtype="bfloat16", max_model_len=512)
    (expected,) = llm.generate([{"prompt_token_ids": [70, 71, 72]}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    for position, own in zip(output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
        for token_id in own:
            assert position[token_id].logprob == pytest.approx(own[token_id].logprob, abs=1e-5)
    samples = ray.get(
        engine.generate_responses.remote("hi", "", params, 64, AutoTokenizer.from_pretrained(tiny_model), num_samples=2)
    )
    assert len(samples) == 2
    for call in ("pause_generation", "resume_generation", "reset_prefix_cache", "sleep"):
        batch_vllm_engine_call(engines, call)
    batch_vllm_engine_call(engines, "wake_up")
    assert batch_vllm_engine_call(engines, "get_num_unfinished_requests") == [0]
