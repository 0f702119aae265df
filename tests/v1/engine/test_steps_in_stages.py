"""Several steps in flight give what one gives: tokens, texts, ranks and every bit of the readings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mixed_requests import results, workload
from thread_stages import make_staged_llm
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams

ROUNDS = 3
FIELDS = {"dtype": "float32", "max_model_len": 128, "max_logprobs": -1}
CACHES: dict[str, dict] = {
    "roomy": {},
    "scarce": {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 24, "max_num_seqs": 5},
    "no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 50, "scheduling_policy": "priority"},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=4)


@pytest.fixture(autouse=True)
def _each_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps are made up of other rows when others run beside them.
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


@pytest.fixture
def staged(folder: Path) -> Iterator[LLM]:
    llm = make_staged_llm(folder, 2, **FIELDS)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("fields", CACHES.values(), ids=CACHES)
def test_results_do_not_change(folder: Path, fields: dict, num_stages: int) -> None:
    alone, staged = make_tiny_llm(folder, **fields), make_staged_llm(folder, num_stages, **FIELDS, **fields)
    for seed in range(ROUNDS):
        prompts, params = workload(np.random.default_rng(seed))
        aborted = [str(seed), str(seed + 3)]
        assert results(staged, prompts, params, aborted) == results(alone, prompts, params, aborted)
        assert is_empty(staged)
    if "num_gpu_blocks_override" in fields:
        assert staged.llm_engine.engine_core.scheduler.num_preemptions
    staged.llm_engine.engine_core.shutdown()


def steps_of(llm: LLM) -> list[dict[str, int]]:
    """The tokens of each request in every step that begins from now on, and the number of those in flight then."""
    core, begun = llm.llm_engine.engine_core, []
    begin = core.executor.begin_step

    def watch(step):
        begun.append((dict(step.num_scheduled_tokens), len(core.steps._in_flight)))
        return begin(step)

    core.executor.begin_step = watch
    return begun


def test_every_stage_has_a_step(staged: LLM) -> None:
    begun = steps_of(staged)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    staged.generate([{"prompt_token_ids": [5, each]} for each in range(8)], params, use_tqdm=False)
    decodes = [(tokens, others) for tokens, others in begun if set(tokens.values()) == {1}]
    # Half of the requests each, but for those at the beginning and the end.
    assert [len(tokens) for tokens, _ in decodes[4:-4]] == [4] * len(decodes[4:-4])
    assert {others for _, others in decodes[4:-4]} == {1}
    assert len(decodes) <= 2 * 8 + 3


def test_no_request_is_in_two_steps_that_draw(staged: LLM) -> None:
    begun = steps_of(staged)
    staged.generate([[5, 6]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert [others for _, others in begun] == [0] * len(begun)


def test_a_prompt_is_cut_so_that_all_stages_compute(folder: Path) -> None:
    staged = make_staged_llm(folder, 2, **{**FIELDS, "max_num_batched_tokens": 64})
    begun = steps_of(staged)
    prompt = {"prompt_token_ids": [5 + each % 90 for each in range(120)]}
    staged.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    assert [sum(tokens.values()) for tokens, _ in begun] == [32, 32, 32, 24]
    assert [others for _, others in begun] == [0, 1, 1, 1]
    staged.llm_engine.engine_core.shutdown()


def test_no_step_is_a_large_part_of_what_there_is(staged: LLM) -> None:
    begun = steps_of(staged)
    prompts = [{"prompt_token_ids": [5 + (each * 7 + place) % 90 for place in range(100)]} for each in range(30)]
    staged.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    sizes = [sum(tokens.values()) for tokens, _ in begun]
    # An eighth, the others fewer, and in the end no more steps than are of use.
    assert sizes[0] == 375 == max(sizes) and sum(sizes) == 3000
    assert min(sizes[:8]) >= 256 and len(sizes) < 16


def test_an_id_is_used_again_while_steps_are_in_flight(staged: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    first = results(staged, [[5, 6]], [params])
    engine = staged.llm_engine
    for _ in range(2):
        engine.add_request("0", {"prompt_token_ids": [7, 6, 5]}, params)
        engine.add_request("1", {"prompt_token_ids": [7, 6]}, params)
        engine.step()
        engine.abort_request(["0", "1"])
    engine.add_request("0", {"prompt_token_ids": [5, 6]}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.outputs[0].token_ids == first[0][1][0][: len(output.outputs[0].token_ids)]
    assert output.outputs[0].token_ids == first[0][1][0]
    assert is_empty(staged)


def test_a_call_comes_after_the_steps_that_have_begun(staged: LLM) -> None:
    """Rank 0 does its part of them first, as the others have."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine, core = staged.llm_engine, staged.llm_engine.engine_core
    for number in range(4):
        engine.add_request(str(number), {"prompt_token_ids": [5, number] * 40}, params)
    engine.step()
    assert core.executor._late
    seen = core.collective_rpc(lambda worker: int(worker.model_runner.states.num_computed_tokens.sum()))
    assert len(set(seen)) == 1 and not core.executor._late
    while engine.has_unfinished_requests():
        engine.step()
    assert is_empty(staged)
