"""Whatever is drafted, requests get the tokens and the readings that they get without, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_id, make_byte_tokenizer
from layouts import needs_kernels
from models_util import make_random_model, random_prompts
from scripted_drafters import Guess, following, speculate
from tiny_adapters import make_adapter
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_capturing_sampler import LogitsCapturingSampler
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.replay import recorded_decode

PROMPTS = ["hello", "a", "the stop", "x y"]
EOS = 2
Sequences = list[list[int]]

READS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sampled": {"logprobs": 0},
    "top": {"logprobs": 3, "logprob_entropy": True},
    "ids": {"logprob_token_ids": [9, 70, 3]},
    "ids and top": {"logprobs": 2, "logprob_token_ids": [9, 5]},
    "logits": {"logprobs": 2, "logprobs_mode": "raw_logits"},
    "processed": {"logprobs": 2, "logprobs_mode": "processed_logprobs"},
    "wide": {"logprobs": -1},
    "prompt": {"logprobs": 1, "prompt_logprobs": 2},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1.0},
    "cut": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "lists": {"temperature": 1.0, "logit_bias": {7: 3.0}, "bad_words": ["e", "th"], "min_tokens": 9},
    "greedy lists": {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}, "min_tokens": 9},
}


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_tiny_llm(folder)


def run(llm: LLM, params: Sequence[SamplingParams], prompts: Sequence[Any] = PROMPTS) -> tuple[list[Any], int]:
    """The finished outputs, and the number of steps; nothing is left of the requests."""
    engine, finished, num_steps = llm.llm_engine, {}, 0
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, own)
    while engine.has_unfinished_requests():
        finished |= {each.request_id: each for each in engine.step() if each.finished}
        num_steps += 1
    assert is_empty(llm)
    return [finished[str(index)] for index in range(len(params))], num_steps


def texts_of(outputs: list[Any]) -> Sequences:
    """All tokens, of the prompt and of each answer."""
    return [[*output.prompt_token_ids, *each.token_ids] for output in outputs for each in output.outputs]


def guesses(texts: Sequences) -> dict[str, Guess]:
    right = following(texts)

    def often(tokens: list[int], room: int) -> list[int]:
        draft = list(right(tokens, room))
        if len(tokens) % 3 and draft:
            draft[len(tokens) % len(draft)] = 3
        return draft

    return {
        "right": right,
        "often right": often,
        "wrong": lambda tokens, room: [EOS + 1] * room,
        "sometimes": lambda tokens, room: right(tokens, room) if len(tokens) % 2 else (),
        "too long": lambda tokens, room: [*right(tokens, 100), *range(3, 60)],
        "invalid": lambda tokens, room: [*right(tokens, 1), -1, VOCAB_SIZE, 2**31 - 1],
        "ends": lambda tokens, room: [*right(tokens, 1), EOS, 5],
        "empty": lambda tokens, room: (),
    }


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        if other.prompt_logprobs is not None:
            own_prompt, wanted_prompt = ([dict(row or {}) for row in each.prompt_logprobs] for each in (one, other))
            assert own_prompt == wanted_prompt
        for own, wanted in zip(one.outputs, other.outputs, strict=True):
            assert_same_choice(own, wanted)


def assert_same_choice(one: CompletionOutput, other: CompletionOutput) -> None:
    assert (one.text, one.token_ids) == (other.text, other.token_ids)
    assert (one.finish_reason, one.stop_reason, one.error) == (other.finish_reason, other.stop_reason, other.error)
    assert (one.logprobs is None, one.allowed_mass) == (other.logprobs is None, other.allowed_mass)
    if other.logprobs is not None:
        assert one.cumulative_logprob == other.cumulative_logprob
        assert len(one.logprobs) == len(other.logprobs)
        for own, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert list(own.items()) == list(wanted.items())
            assert getattr(own, "entropy", None) == getattr(wanted, "entropy", None)


def drawing(index: int = 0, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": index, "max_tokens": 30, "temperature": 1.0, **fields})


def both(
    llm: LLM, params: Sequence[SamplingParams], names: Sequence[str] = ("right", "often right"), prompts: Any = PROMPTS
) -> tuple[list[Any], dict[str, int]]:
    """Outputs, equal with each way of guessing and without; and the numbers of steps."""
    speculate(llm, None)
    expected, num_plain = run(llm, params, prompts)
    num_steps = {"plain": num_plain}
    for name in names:
        speculate(llm, guesses(texts_of(expected))[name])
        found, num_steps[name] = run(llm, params, prompts)
        assert_same(found, expected)
    speculate(llm, None)
    return expected, num_steps


@pytest.mark.parametrize("reads", READS)
def test_requests_of_all_kinds_in_a_batch(llm: LLM, reads: str) -> None:
    params = [drawing(index, **own, **READS[reads]) for index, own in enumerate(SAMPLING.values())]
    prompts = ["hello", "a", "the stop", "x y", "hello", "one more"]
    names = list(guesses([])) if reads in ("top", "prompt") else ["right", "often right"]
    _, num_steps = both(llm, params, names, prompts)
    assert num_steps["right"] <= num_steps["plain"] / 4
    if "wrong" in names:
        assert num_steps["wrong"] == num_steps["empty"] == num_steps["plain"]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_alone(llm: LLM, sampling: str) -> None:
    params = [drawing(3, **SAMPLING[sampling], logprobs=2, logprob_token_ids=[4])]
    _, num_steps = both(llm, params, prompts=["hello"])
    # A step for the prompt, which draws the first token, and one for each five after it.
    assert num_steps["plain"] == 30 and num_steps["right"] == 1 + 6


@needs_kernels
def test_steps_with_drafts_are_recorded(folder: Path) -> None:
    """By numbers of requests and of tokens, however these are spread."""
    llm, eager = make_tiny_llm(folder, dtype="bfloat16"), make_tiny_llm(folder, dtype="bfloat16", enforce_eager=True)
    params = [drawing(index, logprobs=1, max_tokens=30 - index) for index in range(4)]
    expected, _ = both(llm, params, ["right", "often right", "sometimes", "wrong"])
    assert_same(run(eager, params)[0], expected)
    recorded = llm.llm_engine.engine_core.executor.worker.model_runner.replay.steps._recorded
    assert {(4, 4, False), (4, 20, False)} < set(recorded)
    assert max(num_tokens for _, num_tokens, _ in recorded) <= recorded_decode.MAX_EXPANDED_ROWS


def test_many_prompts(llm: LLM) -> None:
    lengths = tuple(1 + index % 17 for index in range(100))
    params = [
        drawing(index, temperature=index % 3 / 2, max_tokens=1 + index % 23, **READS[list(READS)[index % 4]])
        for index in range(len(lengths))
    ]
    both(llm, params, prompts=random_prompts(VOCAB_SIZE, lengths))


def test_max_tokens_within_a_draft(llm: LLM) -> None:
    params = [drawing(1, max_tokens=count, logprobs=1, ignore_eos=True) for count in range(1, 24)]
    expected, _ = both(llm, params, ["right", "too long"], ["hello"] * len(params))
    assert [len(each.outputs[0].token_ids) for each in expected] == list(range(1, 24))


def test_the_context_ends_within_a_draft(llm: LLM) -> None:
    prompts = [[5 + index] * (127 - index) for index in range(13)]
    params = [drawing(index, max_tokens=50, logprobs=1, ignore_eos=True) for index in range(13)]
    expected, _ = both(llm, params, ["right", "too long"], prompts)
    assert [len(each.outputs[0].token_ids) for each in expected] == list(range(1, 14))


def test_what_ends_a_request_within_a_draft(llm: LLM) -> None:
    (whole,), _ = run(llm, [drawing(1, ignore_eos=True)], ["hello"])
    text, token_ids = whole.outputs[0].text, whole.outputs[0].token_ids
    params = [drawing(1, stop_token_ids=[each], logprobs=1) for each in token_ids[2:12]]
    params += [drawing(1, logit_bias={EOS: bias}, min_tokens=least) for bias in (4.0, 5.0, 6.0) for least in (0, 7)]
    for start in range(3, 10):
        stop = text[start : start + 2]
        params += [drawing(1, stop=[stop], include_stop_str_in_output=True, min_tokens=each) for each in (0, 6)]
    params += [drawing(1, logit_bias={9: 50.0}, repetition_detection=_repetition(count)) for count in (3, 4, 6, 7)]
    expected, _ = both(llm, params, ["right", "often right", "ends"], ["hello"] * len(params))
    choices = [each.outputs[0] for each in expected]
    assert {each.finish_reason for each in choices} >= {"stop", "repetition"}
    assert {EOS} <= {each.token_ids[-1] for each in choices}
    assert len({len(each.token_ids) for each in choices}) > 5


def _repetition(count: int) -> dict[str, int]:
    return {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": count}


FORM = {
    "type": "object",
    "properties": {"stop": {"enum": ["the first", "then"]}, "sure": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["stop", "sure", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("reads", [{}, {"logprobs": 2, "grammar_readings": True}], ids=["nothing", "readings"])
def test_a_grammar_ends_within_a_draft(llm: LLM, reads: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    form = {"json": FORM, "disable_any_whitespace": True}
    params = [drawing(index, structured_outputs=form, max_tokens=90, **reads) for index in range(4)]
    params.append(drawing(5, structured_outputs={"regex": "[ab]{3,9}"}, **reads))
    params.append(drawing(6, structured_outputs={"choice": ["then", "the last"]}, temperature=0, **reads))
    prompts = [*PROMPTS, "a", "b"]
    expected, _ = both(llm, params, ["right", "often right", "wrong"], prompts)
    assert [each.outputs[0].finish_reason for each in expected] == ["stop"] * 6


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 9, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 9, "max_num_seqs": 4, "swap_space": 0.01},
        {"enable_prefix_caching": False},
        {"enforce_eager": True},
    ],
    ids=["little budget", "preempted", "swapped", "no prefix cache", "eager"],
)
def test_other_engines_do_the_same(folder: Path, fields: dict[str, Any]) -> None:
    other = make_tiny_llm(folder, **fields)
    params = [drawing(index, **own, **READS["top"], ignore_eos=True) for index, own in enumerate(SAMPLING.values())]
    prompts = ["hello", "a", "the stop and some more of it", "x y", "hello", "one more that is a little longer"]
    both(other, params, ["right", "often right", "wrong", "too long"], prompts)
    if "num_gpu_blocks_override" in fields:
        assert other.llm_engine.engine_core.scheduler.num_preemptions > 0


def test_two_ranks(folder: Path) -> None:
    """Each has a drafter; those of the first count."""
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm = make_tiny_llm(folder, tensor_parallel_size=2, speculative_config=config)
    params = [drawing(index, **own, **READS["top"], ignore_eos=True) for index, own in enumerate(SAMPLING.values())]
    prompts = ["a a a a a a", "b c b c b c b", "hello hello hello", "x y x y x", "the the the", "z"]
    greedy = [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=1)]
    found = run(llm, params, prompts), run(llm, greedy, ["hello"])
    speculate(llm, None)
    expected = run(llm, params, prompts), run(llm, greedy, ["hello"])
    for one, other in zip(found, expected, strict=True):
        assert_same(one[0], other[0])
    assert found[1][1] < expected[1][1] == 60


def test_only_accepted_tokens_are_cached(folder: Path) -> None:
    llm = make_tiny_llm(folder)
    params = drawing(2, max_tokens=60, ignore_eos=True, logprobs=1)
    (first,), _ = run(llm, [params], ["hello"])
    (text,) = texts_of([first])
    cached = []
    for name in ("empty", "wrong", "right", "often right"):
        assert llm.llm_engine.reset_prefix_cache()
        speculate(llm, guesses([text])[name])
        assert_same(run(llm, [params], ["hello"])[0], [first])
        speculate(llm, None)
        # Its blocks are found, and what they hold is what would be computed.
        (again,), _ = run(llm, [drawing(prompt_logprobs=1, max_tokens=1, skip_reading_prefix_cache=True)], [text])
        (hit,), _ = run(llm, [drawing(3, max_tokens=5, logprobs=2)], [[*text, 9]])
        assert again.prompt_logprobs is not None
        cached.append((hit.num_cached_tokens, hit.outputs[0].token_ids, hit.outputs[0].logprobs[0]))
    assert cached[0][0] >= 48
    assert all(each == cached[0] for each in cached)


@pytest.mark.parametrize("name", ["right", "often right", "wrong"])
def test_aborted_requests_leave_nothing(llm: LLM, name: str) -> None:
    speculate(llm, None)
    params = [drawing(index, ignore_eos=True, max_tokens=60) for index in range(4)]
    expected, _ = run(llm, params)
    speculate(llm, guesses(texts_of(expected))[name])
    engine = llm.llm_engine
    for num_steps in range(1, 7):
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, params[index])
        for _ in range(num_steps):
            engine.step()
        engine.abort_request(["1", "3"])
        engine.step()
        engine.abort_request(["0", "2"])
        assert is_empty(llm)
    assert_same(run(llm, params)[0], expected)
    speculate(llm, None)


@pytest.mark.parametrize("method", ["add_request", "observe", "propose"])
def test_requests_go_on_without_a_drafter_that_fails(
    llm: LLM, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    speculate(llm, None)
    params = [drawing(index, logprobs=1) for index in range(4)]
    expected, num_plain = run(llm, params)
    drafter = speculate(llm, guesses(texts_of(expected))["right"])
    calls = 0

    def fail(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if method == "add_request":
            drafter.slots.add(args[0])
        raise RuntimeError("no drafts today")

    monkeypatch.setattr(drafter, method, fail)
    found, num_steps = run(llm, params)
    assert_same(found, expected)
    assert calls == (4 if method == "add_request" else 1)
    assert num_plain - 4 <= num_steps <= num_plain
    monkeypatch.undo()
    # Later requests are drafted for.
    found, num_steps = run(llm, params)
    assert_same(found, expected)
    assert num_steps < num_plain / 3
    speculate(llm, None)


def test_a_stream_has_several_positions_in_a_delta(llm: LLM) -> None:
    speculate(llm, None)
    (whole,), _ = run(llm, [drawing(3, logprobs=2)], ["hello"])
    speculate(llm, guesses(texts_of([whole]))["right"])
    engine, parts = llm.llm_engine, []
    engine.add_request("one", "hello", drawing(3, logprobs=2, output_kind=RequestOutputKind.DELTA))
    while engine.has_unfinished_requests():
        parts += [each.outputs[0] for each in engine.step()]
    assert "".join(each.text for each in parts) == whole.outputs[0].text
    assert [token for each in parts for token in each.token_ids] == whole.outputs[0].token_ids
    assert [len(each.token_ids) for each in parts[:3]] == [1, 5, 5]
    assert all(len(each.logprobs) == len(each.token_ids) for each in parts)
    speculate(llm, None)


class Counting(AdapterLogitsProcessor):
    """Forbids a token that depends on all tokens so far, each of which it must see once and in order."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        seen: list[int] = []

        def process(output_ids: list[int], logits: Any) -> Any:
            assert output_ids[:-1] == seen[: len(output_ids)] if output_ids else not seen
            seen[:] = output_ids
            logits[sum(output_ids) % VOCAB_SIZE] = -float("inf")
            return logits

        return process


def test_processors_see_accepted_tokens_alone(folder: Path, llm: LLM) -> None:
    def follow() -> Any:
        seen: list[int] = []

        def process(output_ids: list[int], logits: Any) -> Any:
            assert list(output_ids[:-1]) == seen if output_ids else not seen
            seen[:] = list(output_ids)
            logits[(7 * len(output_ids) + sum(output_ids)) % VOCAB_SIZE] += 9.0
            return logits

        return process

    def params() -> list[SamplingParams]:
        return [drawing(index, logprobs=1, logits_processors=[follow()] if index % 2 else None) for index in range(4)]

    speculate(llm, None)
    expected, _ = run(llm, params())
    for name, guess in guesses(texts_of(expected)).items():
        speculate(llm, guess)
        assert_same(run(llm, params())[0], expected), name
    speculate(llm, None)
    custom = make_tiny_llm(folder, logits_processors=[Counting])
    both(custom, [drawing(index, temperature=index % 2) for index in range(4)], list(guesses([])))


def test_errors_within_a_draft(llm: LLM) -> None:
    """The tokens before an error are returned, and others go on."""

    def failing(how: str) -> Any:
        def process(output_ids: list[int], logits: Any) -> Any:
            if len(output_ids) == 7:
                if how == "raises":
                    raise RuntimeError("seven is enough")
                logits[3] = float(how)
            return logits

        return process

    def params() -> list[SamplingParams]:
        bad = [drawing(logprobs=1, ignore_eos=True, logits_processors=[failing(how)]) for how in ("raises", "nan")]
        # After three of them no token is left.
        four = drawing(temperature=0, allowed_token_ids=[byte_id(ord("a"))], bad_words=["aaaa"], logprobs=1)
        return [*bad, four, drawing(3, logprobs=2, ignore_eos=True)]

    speculate(llm, None)
    expected, _ = run(llm, params())
    assert [len(each.outputs[0].token_ids) for each in expected] == [7, 7, 3, 30]
    assert [each.outputs[0].finish_reason for each in expected] == ["error"] * 3 + ["length"]
    longer = [[*text, *range(3, 9)] for text in texts_of(expected)]
    longer[2] = [*longer[2][:-6], *[byte_id(ord("a"))] * 6]
    for name in ("right", "often right", "wrong"):
        speculate(llm, guesses(longer)[name])
        found, _ = run(llm, params())
        for one, other in zip(found, expected, strict=True):
            assert_same([one], [other])
    speculate(llm, None)


def test_adapters_and_a_following_sampler(tmp_path: Path) -> None:
    """Requests with adapters among others; and captured logits are those of tokens that were kept, each once."""
    folder, model = make_random_model("llama", "small", tmp_path / "model", vocab_size=VOCAB_SIZE)
    make_byte_tokenizer(folder)
    adapters = [make_adapter(tmp_path / f"adapter{index}", model, seed=index) for index in range(2)]
    requests = [None, *(LoRARequest(f"a{index}", index + 1, str(path)) for index, path in enumerate(adapters)), None]
    llm = make_tiny_llm(folder, enable_lora=True, max_loras=2)
    params = [
        drawing(index, temperature=index % 2, logprobs=2, repetition_penalty=1 + index % 3 / 10, ignore_eos=True)
        for index in range(4)
    ]
    expected = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=requests)
    captured = []
    for name in ("empty", "right", "often right"):
        speculate(llm, guesses(texts_of(expected))[name])
        with LogitsCapturingSampler().install(llm) as sampler:
            found = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=requests)
            captured.append([sampler.get_captured_logits(each.request_id) for each in found])
        assert_same(found, expected)
    assert [len(each) for each in captured[0]] == [30] * 4
    for other in captured[1:]:
        assert all(torch.equal(*pair) for pair in zip(other, captured[0], strict=True))


def test_samples_of_a_request(llm: LLM) -> None:
    params = [drawing(1, n=3, logprobs=1), drawing(2, n=2, best_of=3), drawing(max_tokens=0, logprobs=3)]
    both(llm, params, prompts=["hello", byte_ids("abc"), "x"])


def byte_ids(text: str) -> list[int]:
    return [byte_id(ord(each)) for each in text]
