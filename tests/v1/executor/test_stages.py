"""Stages in processes of their own: what they compute, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import rank_faults
from models_util import random_prompts
from processes import is_running
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, AsyncLLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import EngineDeadError
from vllm.v1.executor import worker_monitor

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(100, (5, 40, 2, 90))]
READS = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
DRAWS = SamplingParams(max_tokens=6, seed=3, logprob_token_ids=[7, 9], repetition_penalty=1.2, top_p=0.9)


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


def test_a_core_process_of_two_stages(folder: Path, alone: LLM) -> None:
    """As of a server."""

    async def texts() -> list[str]:
        arguments = AsyncEngineArgs(str(folder), dtype="float32", max_model_len=128, pipeline_parallel_size=2)
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            return await asyncio.gather(*(text(engine, str(number)) for number in range(len(PROMPTS))))
        finally:
            engine.shutdown()

    async def text(engine: AsyncLLM, number: str) -> str:
        texts = [output.outputs[0].text async for output in engine.generate(PROMPTS[int(number)], GREEDY, number)]
        return texts[-1]

    expected = [output.outputs[0].text for output in alone.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert asyncio.run(texts()) == expected


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


def test_stages_of_several_ranks(folder: Path) -> None:
    """The same bits as of as many ranks without stages, whose sums have the same order."""
    wide, both = (make_tiny_llm(folder, tensor_parallel_size=2, pipeline_parallel_size=size) for size in (1, 2))
    assert both.collective_rpc(rank_faults.layers_here) == [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert both.collective_rpc(rank_faults.raise_on, args=(4,)) == [0, 1, 2, 3]
    for params in READS, DRAWS:
        assert_same(both, wide, params)
    for llm in wide, both:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("rank", "kind", "message"),
    rank_faults.ending_faults(),
    ids=lambda value: str(value) if len(str(value)) < 10 else "",
)
def test_a_stage_that_fails_ends_its_engine(
    rank: int, kind: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_monitor, "_SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(worker_monitor, "_STALL_SECONDS", 4.0)
    broken = make_tiny_llm(folder, pipeline_parallel_size=2)
    broken.generate(PROMPTS, READS, use_tqdm=False)
    own, other = broken.collective_rpc(rank_faults.fail_in_step, args=(rank, kind))
    assert own == os.getpid() != other
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=message):
            broken.generate(PROMPTS, READS, use_tqdm=False)
    assert time.monotonic() - began < 10.0
    assert not is_running(other)
    with pytest.raises(EngineDeadError, match=message):
        broken.collective_rpc("determine_num_blocks")


def test_an_engine_that_nobody_holds_ends_its_stages(folder: Path) -> None:
    forgotten = make_tiny_llm(folder, pipeline_parallel_size=3)
    _, *others = forgotten.collective_rpc(rank_faults.fail_in_step, args=(9, ""))
    del forgotten
    gc.collect()
    deadline = time.monotonic() + 10.0
    while any(map(is_running, others)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size=5 exceeds the model's 4 layers"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer of at least 1, got 0"),
        ({"distributed_executor_backend": "uni"}, "'uni' drives one device, but pipeline_parallel_size is 2"),
        ({"distributed_executor_backend": "external_launcher"}, "needs distributed_executor_backend='mp'"),
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
