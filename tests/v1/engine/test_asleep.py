"""An engine that sleeps, or of which a part was woken: every public method ends in time, and says what to do."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import make_byte_tokenizer
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.decisions.params import DecisionParams
from vllm.decisions.plan import DecisionPlan
from vllm.params.beam_search import BeamSearchParams
from vllm.v1.engine.llm_engine import LLMEngine

QUIET = {"use_tqdm": False}
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=3)
QUESTIONS = [{"type": "predicate", "instructions": "c"}]
SECONDS = 60


def plan(llm: LLM) -> DecisionPlan:
    return DecisionPlan(llm.model_config, llm.llm_engine.tokenizer, "ab", QUESTIONS, DecisionParams())


def run_engine(engine: LLMEngine, queue: Callable[[], Any]) -> list[Any]:
    queue()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def queue_processed(engine: LLMEngine) -> None:
    prompts = engine.input_processor.process_prompts(["ab"], [GREEDY])
    engine.add_processed(["a"], prompts, [engine.input_processor.process_params(GREEDY, 2)])


# Public methods that need the model, which sleeps.
GENERATING: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate(["ab", "c"], GREEDY, **QUIET),
    "chat": lambda llm: llm.chat(
        [{"role": "user", "content": "ab"}], GREEDY, chat_template="{{ messages[0].content }}", **QUIET
    ),
    "beam_search": lambda llm: llm.beam_search(["ab"], BEAMS),
    "enqueue": lambda llm: [llm.enqueue(["ab"], GREEDY), llm.wait_for_completion(**QUIET)],
    "enqueue_chat": lambda llm: [
        llm.enqueue_chat([{"role": "user", "content": "ab"}], GREEDY, chat_template="{{ messages[0].content }}"),
        llm.wait_for_completion(**QUIET),
    ],
    "score_labels": lambda llm: llm.score_labels(["ab"], ["x", "yz"], **QUIET),
    "score_processed": lambda llm: llm.score_processed(
        llm.llm_engine.input_processor.process_prompts(["ab"], [GREEDY]), ["x", "yz"], **QUIET
    ),
    "score": lambda llm: llm.score("ab", ["c", "d"], **QUIET),
    "score_pairs": lambda llm: llm.score_pairs("ab", ["c", "d"], ["x", "y"], **QUIET),
    "decide": lambda llm: llm.decide("ab", QUESTIONS, **QUIET),
    "decide_plans": lambda llm: llm.decide_plans([plan(llm)], **QUIET),
}
POOLING: dict[str, Callable[[LLM], Any]] = {
    "embed": lambda llm: llm.embed(["ab", "c"], **QUIET),
    "encode": lambda llm: llm.encode(["ab", "c"], pooling_task="embed", **QUIET),
    "classify": lambda llm: llm.classify(["ab"], **QUIET),
    "reward": lambda llm: llm.reward(["ab"], **QUIET),
    "score": lambda llm: llm.score("ab", ["c", "d"], **QUIET),
}
ENGINE: dict[str, Callable[[LLMEngine], Any]] = {
    "add_request": lambda engine: run_engine(engine, lambda: engine.add_request("a", "ab", GREEDY)),
    "add_processed": lambda engine: run_engine(engine, lambda: queue_processed(engine)),
}
# Calls that answer while it sleeps, as they do otherwise.
CONTROL: dict[str, Callable[[Any], Any]] = {
    "get_default_sampling_params": lambda llm: llm.get_default_sampling_params(),
    "get_metrics": lambda llm: llm.get_metrics(),
    "get_model_config": lambda engine: engine.get_model_config(),
    "get_supported_tasks": lambda engine: engine.get_supported_tasks(),
    "get_tokenizer": lambda llm: llm.get_tokenizer(),
    "set_tokenizer": lambda llm: llm.set_tokenizer(llm.get_tokenizer()),
    "preprocess_chat": lambda llm: llm.preprocess_chat(
        [{"role": "user", "content": "ab"}], chat_template="{{ messages[0].content }}"
    ),
    "get_weight_version": lambda llm: llm.get_weight_version(),
    "init_weight_transfer_engine": lambda llm: llm.init_weight_transfer_engine(),
    "get_world_size": lambda llm: llm.get_world_size(),
    "is_sleeping": lambda llm: llm.is_sleeping(),
    "reset_mm_cache": lambda llm: llm.reset_mm_cache(),
    "reset_encoder_cache": lambda llm: llm.reset_encoder_cache(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(reset_running_requests=True),
    "collective_rpc": lambda llm: llm.collective_rpc(lambda worker: worker.rank),
    "start_profile": lambda llm: llm.start_profile(),
    "stop_profile": lambda llm: llm.stop_profile(),
    "abort_request": lambda engine: engine.abort_request(["a"]),
    "do_log_stats": lambda engine: engine.do_log_stats(),
    "get_num_unfinished_requests": lambda engine: engine.get_num_unfinished_requests(),
    "has_unfinished_requests": lambda engine: engine.has_unfinished_requests(),
    "step": lambda engine: engine.step(),
}
# The worker says itself that its weights are gone: tests/layers/test_weight_update.py.
WORKERS = {"apply_model"}
OTHERS = {"decision_plan", "wait_for_completion", "from_engine_args", "from_vllm_config", "sleep", "wake_up"}
OTHERS |= {"add_lora", "remove_lora", "list_loras", "pin_lora", "with_adapters"}  # test_llm_adapters.py
OTHERS |= {"start_weight_update", "update_weights", "finish_weight_update"}  # test_weight_versions.py


def public_methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}


def control_of(kind: type) -> dict[str, Callable[[Any], Any]]:
    return {name: CONTROL[name] for name in CONTROL.keys() & public_methods(kind)}


def test_no_method_is_forgotten():
    known = {*CONTROL, *WORKERS, *OTHERS}
    assert public_methods(LLM) <= {*GENERATING, *POOLING, *known}
    assert public_methods(LLMEngine) <= {*ENGINE, *known}


@contextmanager
def time_limit(what: str) -> Iterator[None]:
    """TimeoutError: it took longer than SECONDS."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{what} took more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    from tiny_encoders import SIZES, save
    from transformers import BertConfig

    folder = save(tmp_path_factory.mktemp("encoder"), BertConfig(**{**SIZES, "vocab_size": 300}))
    make_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def generating(folder):
    return make_tiny_llm(folder, disable_log_stats=False)


@pytest.fixture(scope="module")
def ahead(folder):
    """Schedules a step while the one before runs."""
    return make_tiny_llm(folder, async_scheduling=True)


@pytest.fixture(scope="module")
def pooling(folder):
    return make_tiny_llm(folder, runner="pooling")


@pytest.fixture(scope="module")
def encoding(encoder):
    return make_tiny_llm(encoder)


def outcome(call: Callable[[Any], Any], on: Any) -> Any:
    try:
        return call(on)
    except Exception as error:
        return error


def check(calls: dict[str, Callable[[Any], Any]], on: Any, awake: dict[str, Any]) -> None:
    """Calls that succeed when it is awake are errors that say what to do."""
    for name, call in calls.items():
        with time_limit(name):
            got = outcome(call, on)
        if isinstance(awake[name], Exception):
            assert isinstance(got, type(awake[name])), name
        elif name in CONTROL:
            assert type(got) is type(awake[name]), name
        else:
            assert isinstance(got, RuntimeError) and "call wake_up() first" in str(got), name


def readings(llm: LLM) -> list[np.ndarray]:
    if llm.model_config.runner_type == "pooling":
        return [np.asarray(each.outputs.embedding) for each in llm.embed(["ab", "c"], **QUIET)]
    return [each.token_logprobs for each in llm.score_labels(["ab", "c"], ["x", "yz"], **QUIET)]


STATES = {
    "asleep": (1, None),
    "deeply asleep": (2, None),
    "weights awake": (1, ["weights"]),
    "weights loaded": (2, ["weights"]),
    "cache awake": (1, ["kv_cache"]),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", ["generating", "ahead", "pooling", "encoding"])
def test_every_method(kind, state, request):
    llm, (level, tags) = request.getfixturevalue(kind), STATES[state]
    engine, generates = llm.llm_engine, kind in ("generating", "ahead")
    tables = [
        (llm, (GENERATING if generates else POOLING) | control_of(LLM)),
        (engine, (ENGINE if generates else {}) | control_of(LLMEngine)),
    ]
    awake = [{name: outcome(call, on) for name, call in calls.items()} for on, calls in tables]
    before = readings(llm)
    llm.sleep(level)
    if tags is not None:
        assert not llm.wake_up(tags)
    assert llm.is_sleeping()
    for (on, calls), wanted in zip(tables, awake, strict=True):
        check(calls, on, wanted)
    assert llm.wake_up()
    assert not llm.llm_engine.has_unfinished_requests()
    for one, other in zip(readings(llm), before, strict=True):
        np.testing.assert_array_equal(one, other)
    if generates:
        assert is_empty(llm)


def test_requests_that_were_kept(generating):
    """A step says that it sleeps and keeps them; so does what awaits them; they go on once it is awake."""
    llm, engine = generating, generating.llm_engine
    wanted = [each.outputs[0].token_ids for each in llm.generate(["ab", "c"], GREEDY, **QUIET)]
    llm.enqueue(["ab", "c"], GREEDY)
    engine.step()
    llm.sleep(mode="keep")
    calls = [engine.step, llm.wait_for_completion, lambda: llm.sleep(mode="wait"), lambda: llm.generate("ab", GREEDY)]
    for tags in (None, ["weights"]):
        for call in calls:
            with time_limit("a call"), pytest.raises(RuntimeError, match=r"call wake_up\(\) first"):
                call()
        llm.wake_up(tags or ["weights"])
    assert llm.wake_up()
    assert [each.outputs[0].token_ids for each in llm.wait_for_completion(**QUIET)] == wanted


def test_a_paused_engine_does_not_spin(generating):
    core = generating.llm_engine.engine_core
    core.pause()
    try:
        with time_limit("generate"), pytest.raises(RuntimeError, match="paused"):
            generating.generate("ab", GREEDY, **QUIET)
    finally:
        core.pause(False)
    assert is_empty(generating)


@pytest.mark.parametrize("kind", ["generating", "ahead", "pooling", "encoding"])
def test_requests_that_can_never_be_scheduled(kind, request, monkeypatch):
    """A fault of the scheduler is an error, not a loop; the engine goes on."""
    llm = request.getfixturevalue(kind)
    before, scheduler = readings(llm), llm.llm_engine.engine_core.scheduler
    with monkeypatch.context() as patch:
        patch.setattr(type(scheduler.waiting), "__len__", lambda self: 0)
        patch.setattr(type(scheduler.waiting), "__bool__", lambda self: False, raising=False)
        with time_limit("readings"), pytest.raises(RuntimeError, match=r"none of \d unfinished requests can ever be"):
            readings(llm)
    assert not llm.llm_engine.has_unfinished_requests()
    for one, other in zip(readings(llm), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_without_requests(generating):
    assert generating.llm_engine.step() == []
    generating.sleep()
    assert generating.llm_engine.step() == []
    assert generating.wake_up()
