"""async_scheduling=True gives what False gives: tokens, texts, ranks and every bit of the readings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from mixed_requests import results, workload
from tiny_llm import is_empty, make_tiny_llm

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample.logits_capturing_sampler import LogitsCapturingSampler

ROUNDS = 3


@pytest.fixture(autouse=True)
def _each_row_alone(monkeypatch):
    # Steps are made up of other rows when they are scheduled at other times.
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


CACHES = {
    "roomy": {},
    "scarce": {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 24, "max_num_seqs": 5},
    "no cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 50, "scheduling_policy": "priority"},
}


@pytest.mark.parametrize("fields", CACHES.values(), ids=CACHES)
def test_results_do_not_change(folder, fields):
    ahead, waiting = (make_tiny_llm(folder, async_scheduling=value, **fields) for value in (True, False))
    for seed in range(ROUNDS):
        prompts, params = workload(np.random.default_rng(seed))
        aborted = [str(seed), str(seed + 3)]
        assert results(ahead, prompts, params, aborted) == results(waiting, prompts, params, aborted)
        assert is_empty(ahead) and is_empty(waiting)
    if "num_gpu_blocks_override" in fields:
        assert ahead.llm_engine.engine_core.scheduler.num_preemptions


def test_steps_do_overlap(folder):
    llm = make_tiny_llm(folder, async_scheduling=True)
    worker = llm.llm_engine.engine_core.executor.worker
    in_flight, most, begin = 0, 0, worker.begin_step

    class Watched:
        def __init__(self, inner):
            self.inner = inner

        def result(self):
            nonlocal in_flight
            in_flight -= 1
            return self.inner.result()

    def watch(step):
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        return Watched(begin(step))

    worker.begin_step = watch
    llm.generate([[5, 6]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert most == 2


def test_the_first_call_has_news_though_a_dead_step_is_in_flight(folder):
    llm = make_tiny_llm(folder, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    first = results(llm, [[5, 6]], [params])
    engine = llm.llm_engine
    for _ in range(2):
        engine.add_request("0", {"prompt_token_ids": [5, 6]}, params)
        engine.step()
        engine.abort_request(["0"])
    engine.add_request("0", {"prompt_token_ids": [5, 6]}, params)
    (output,) = engine.step()
    assert output.outputs[0].token_ids == first[0][1][0][:1]
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert output.outputs[0].token_ids == first[0][1][0]


def test_faults_leave_the_engine_usable_and_empty(folder, monkeypatch):
    llm = make_tiny_llm(folder, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def tokens():
        return [output.outputs[0].token_ids for output in llm.generate([[5], [6, 7]], params, use_tqdm=False)]

    before = tokens()
    core = llm.llm_engine.engine_core
    runner = core.executor.worker.model_runner
    places = (
        (core.scheduler, "schedule"),
        (core.executor.worker, "begin_step"),
        (runner.model, "compute_logits"),
        (runner.states, "reserve"),
        (runner.states, "fill"),
        (core.scheduler, "update_from_output"),
    )
    for (owner, name), at, kind in itertools.product(places, (1, 2, 4), (KeyboardInterrupt, RuntimeError)):
        calls, inner = itertools.count(1), getattr(owner, name)

        def fail(*args, inner=inner, calls=calls, at=at, kind=kind, **kwargs):
            if next(calls) == at:
                raise kind
            return inner(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(kind):
                tokens()
        assert is_empty(llm), (name, at)
        assert tokens() == before, (name, at)


def test_a_broken_row_ends_its_request_alone(folder, monkeypatch):
    llm = make_tiny_llm(folder, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
    prompts = [[5, 6], [7, 8, 9]]
    whole = results(llm, prompts, [params] * 2)
    model, calls = llm.llm_engine.engine_core.executor.worker.model_runner.model, itertools.count()
    inner = model.compute_logits

    def spoil(hidden):
        logits = inner(hidden)
        if next(calls) == 3:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(model, "compute_logits", spoil)
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    done = {}
    while engine.has_unfinished_requests():
        done.update({output.request_id: output for output in engine.step()})
    assert done["0"].outputs[0].finish_reason == "error"
    assert done["0"].outputs[0].token_ids == whole[0][1][0][:3]
    assert done["1"].outputs[0].token_ids == whole[1][1][0]
    assert is_empty(llm)


def test_the_setting(folder):
    def of(**fields):
        return EngineArgs(str(folder), device="cpu", **fields).create_engine_config()

    assert not of().scheduler_config.async_scheduling
    assert of(async_scheduling=True).scheduler_config.async_scheduling
    assert of(async_scheduling=True, tensor_parallel_size=2).scheduler_config.async_scheduling


def test_who_captures_logits_sees_no_row_that_is_dropped(folder):
    llm = make_tiny_llm(folder, async_scheduling=True)
    stops = SamplingParams(seed=1, max_tokens=30, stop_token_ids=list(range(40, 160)))
    with LogitsCapturingSampler([3]).install(llm) as capture:
        outputs = llm.generate([[5], [6, 7], [8]], stops, use_tqdm=False)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)
    assert len(capture.get_captured_logits()) == num_tokens
