"""Tokens that follow without a choice are appended together, with all that drawing them one by one would give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_id
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.features.forced_runs import runner as forced_runs
from vllm.v1.features.grammars import runner as grammar

pytest.importorskip("llguidance")

PROMPTS = ["hello", "a", "the stop", "x y"]
SCHEMA = {
    "type": "object",
    "properties": {"stop": {"enum": ["the first", "then"]}, "sure": {"type": "boolean"}, "n": {"const": "日本日本"}},
    "required": ["stop", "sure", "n"],
    "additionalProperties": False,
}
FORM = {"json": SCHEMA, "disable_any_whitespace": True}
READS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sampled": {"logprobs": 0},
    "top": {"logprobs": 3, "logprob_entropy": True, "grammar_readings": True},
    "ids": {"logprob_token_ids": [9, 70, byte_id(ord("o"))], "grammar_readings": True},
    "mass": {"grammar_readings": True},
    "logits": {"logprobs": 2, "logprobs_mode": "raw_logits"},
    "processed": {"logprobs": 2, "logprobs_mode": "processed_logprobs"},
    "wide": {"logprobs": -1},
}


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_tiny_llm(folder)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Requests that begin within draw each token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_takes_runs", lambda params: False)
        yield


def drawing(index: int = 0, **fields: Any) -> SamplingParams:
    usual = {"temperature": 1.0, "seed": index, "max_tokens": 100, "structured_outputs": FORM}
    return SamplingParams(**{**usual, **fields})


def run(llm: LLM, params: list[SamplingParams], prompts: list[str] = PROMPTS) -> tuple[list[CompletionOutput], int]:
    """The answers, and the number of steps."""
    engine = llm.llm_engine
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, own)
    finished, num_steps = {}, 0
    while engine.has_unfinished_requests():
        finished |= {each.request_id: each for each in engine.step() if each.finished}
        num_steps += 1
    assert is_empty(llm)
    return [choice for index in range(len(params)) for choice in finished[str(index)].outputs], num_steps


def assert_same(found: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert (one.logprobs is None, one.allowed_mass is None) == (other.logprobs is None, other.allowed_mass is None)
        if other.allowed_mass is not None:
            assert one.allowed_mass == pytest.approx(other.allowed_mass, abs=1e-5)
            assert one.allowed_mass_total == pytest.approx(other.allowed_mass_total, abs=1e-4)
        if other.logprobs is None:
            continue
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
        assert len(one.logprobs) == len(other.logprobs) == len(other.token_ids)
        for own, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert list(own) == list(wanted)
            for token_id, each in wanted.items():
                assert own[token_id].logprob == pytest.approx(each.logprob, abs=1e-5)
                assert own[token_id].logit == pytest.approx(each.logit, abs=1e-5)
                assert own[token_id].rank == each.rank


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_everything_is_as_one_by_one(llm: LLM, reads: str, temperature: float) -> None:
    params = [drawing(index, temperature=temperature, **READS[reads]) for index in range(4)]
    found, num_steps = run(llm, params)
    with one_by_one():
        expected, num_single = run(llm, params)
    assert_same(found, expected)
    assert all(each.finish_reason == "stop" for each in expected)
    if reads == "processed":
        # A request may wait for its grammar for a step.
        assert num_steps > num_single / 2
    else:
        assert num_steps < num_single / 3


@pytest.mark.parametrize("reads", ["nothing", "top"])
def test_an_answer_may_end_within_a_run(llm: LLM, reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forced_runs, "MOST_ROWS", 100)
    limits = [drawing(max_tokens=count, **READS[reads]) for count in range(1, 40)]
    found, _ = run(llm, limits, ["hello"] * len(limits))
    with one_by_one():
        expected, _ = run(llm, limits, ["hello"] * len(limits))
    assert_same(found, expected)
    assert [len(each.token_ids) for each in found] == list(range(1, 40))
    stops = ['"s', "su", 're":', "日", "e"]
    stopping = [
        drawing(stop=[stop], include_stop_str_in_output=include, min_tokens=least, **READS[reads])
        for stop in stops
        for include in (False, True)
        for least in (0, 20)
    ]
    found, _ = run(llm, stopping, ["hello"] * len(stopping))
    with one_by_one():
        expected, _ = run(llm, stopping, ["hello"] * len(stopping))
    assert_same(found, expected)
    assert {each.stop_reason for each in found} >= set(stops)
    ends = [drawing(stop_token_ids=[byte_id(ord(sign))], **READS[reads]) for sign in ':"u']
    with one_by_one():
        expected, _ = run(llm, ends, ["hello"] * 3)
    assert_same(run(llm, ends, ["hello"] * 3)[0], expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 9, "max_num_seqs": 4},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_gpu_blocks_override": 9, "max_num_seqs": 4},
        {"tensor_parallel_size": 2},
        {"enable_prefix_caching": False},
    ],
    ids=["little budget", "preempted", "async", "async preempted", "two ranks", "no prefix cache"],
)
def test_other_engines_do_the_same(folder: Path, llm: LLM, fields: dict[str, Any]) -> None:
    other = make_tiny_llm(folder, **fields)
    params = [drawing(index, **READS[reads]) for index, reads in enumerate(("nothing", "top", "ids", "mass"))]
    params += [SamplingParams(temperature=0, max_tokens=30, logprobs=1), drawing(9, n=3, **READS["top"])]
    prompts = [*PROMPTS, "free", "hello"]
    found, _ = run(other, params, prompts)
    with one_by_one():
        expected, _ = run(llm, params, prompts)
    assert_same(found, expected)
    if "num_gpu_blocks_override" in fields:
        assert other.llm_engine.engine_core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("reads", ["nothing", "top"])
def test_a_stream_has_several_positions_in_a_delta(llm: LLM, reads: str) -> None:
    params = drawing(3, output_kind=RequestOutputKind.DELTA, **READS[reads])
    engine, parts = llm.llm_engine, []
    engine.add_request("one", "hello", params)
    while engine.has_unfinished_requests():
        parts += [each.outputs[0] for each in engine.step()]
    (whole,), _ = run(llm, [drawing(3, **READS[reads])], ["hello"])
    assert "".join(each.text for each in parts) == whole.text
    assert [token for each in parts for token in each.token_ids] == whole.token_ids
    assert max(len(each.token_ids) for each in parts) > 5
    for each in parts:
        if reads == "top":
            assert len(each.logprobs) == len(each.allowed_mass) == len(each.token_ids)


def test_what_else_rules_tokens_out_is_obeyed(llm: LLM) -> None:
    params = [
        drawing(bad_words=["sure"]),
        drawing(allowed_token_ids=[byte_id(ord("{")), byte_id(ord('"'))]),
        drawing(logit_bias={byte_id(ord(":")): -100.0}, presence_penalty=1.5, repetition_penalty=1.3, **READS["top"]),
        drawing(top_k=1, min_p=0.9),
    ]
    found, _ = run(llm, params)
    with one_by_one():
        expected, _ = run(llm, params)
    assert_same(found, expected)
    assert [each.stop_reason for each in found] == ["no_token_left"] * 2 + [None] * 2
