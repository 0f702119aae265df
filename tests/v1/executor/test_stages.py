"""Stages in processes of their own: what they compute, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import rank_faults
from models_util import random_prompts
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(100, (5, 40, 2, 90))]
READS = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
DRAWS = SamplingParams(max_tokens=6, seed=3, logprob_token_ids=[7, 9], repetition_penalty=1.2, top_p=0.9)


@pytest.fixture(scope="module", autouse=True)
def one_thread_a_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    return make_tiny_llm(folder)


@pytest.fixture(scope="module")
def staged(folder: Path) -> Iterator[LLM]:
    llm = make_tiny_llm(folder, pipeline_parallel_size=2)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def assert_same(ours: LLM, other: LLM, params: SamplingParams) -> None:
    for own, wanted in zip(*(llm.generate(PROMPTS, params, use_tqdm=False) for llm in (ours, other)), strict=True):
        mine, theirs = own.outputs[0], wanted.outputs[0]
        assert mine.token_ids == theirs.token_ids
        np.testing.assert_array_equal(mine.logprobs.logprobs, theirs.logprobs.logprobs)
        if wanted.prompt_logprobs is not None:
            np.testing.assert_array_equal(own.prompt_logprobs.logprobs, wanted.prompt_logprobs.logprobs)


@pytest.mark.parametrize("params", [READS, DRAWS], ids=["reads", "draws"])
def test_processes_compute_what_one_does(params: SamplingParams, staged: LLM, alone: LLM) -> None:
    assert_same(staged, alone, params)


def test_one_matrix_a_boundary(staged: LLM) -> None:
    core = staged.llm_engine.engine_core
    before = core.stats()["collective_bytes"]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    staged.generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8]}], params, use_tqdm=False)
    received = core.stats()["collective_bytes"]["receive"] - before["receive"]
    # 4 tokens of prompts, and 3 of the 4 generated ones of each request; 64 float32 values each.
    assert received == (4 + 2 * 3) * 64 * 4


def test_a_call_reaches_every_stage(staged: LLM) -> None:
    assert staged.collective_rpc(rank_faults.layers_here) == [[2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size=5 exceeds the model's 4 layers"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer of at least 1, got 0"),
        ({"distributed_executor_backend": "uni"}, "'uni' drives one device, but pipeline_parallel_size is 2"),
        ({"distributed_executor_backend": "external_launcher"}, "needs distributed_executor_backend='mp'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "needs no speculative_config"),
        ({"enable_lora": True}, "needs enable_lora=False"),
        ({"enable_prompt_embeds": True}, "needs enable_prompt_embeds=False"),
        ({"kv_store": "store"}, "needs no kv_store"),
        ({"model_impl": "transformers"}, "runs by a module of its own"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_stages_do_not_do_is_refused_by_name(fields: dict, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(folder), **{"pipeline_parallel_size": 2, **fields}).create_engine_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,2", "must have pipeline_parallel_size=2 numbers that add up to the model's 4 layers, got 3,2"),
        ("4", "must have pipeline_parallel_size=2 numbers"),
        ("4,0", "VLLM_PP_LAYER_PARTITION must be positive numbers with commas between them, got '4,0'"),
        ("a,b", "must be positive numbers"),
    ],
)
def test_a_partition_that_is_none(text: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", text)
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(folder), pipeline_parallel_size=2).create_engine_config()
