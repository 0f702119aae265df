"""Sequences whose constraints leave no token end alone, with what they have; where nothing is drawn, none end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from byte_tokenizer import EOS, byte_ids
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

PROMPTS = [byte_ids(text) for text in ("ab", "the cat", "stop it now")]
A, B = byte_ids("ab")


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "async_scheduling"])
def llm(folder, request):
    return make_tiny_llm(folder, async_scheduling=request.param)


def generate(llm: LLM, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def nothing_after_two(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.fill_(-torch.inf) if len(output_ids) == 2 else logits


def nothing(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.fill_(-torch.inf)


LATER = [
    pytest.param({"allowed_token_ids": [A], "bad_words": ["aaa"]}, id="bad_words"),
    pytest.param({"logits_processors": [nothing_after_two]}, id="processor"),
    # The words allow one order of the two letters alone, which comes to its end.
    pytest.param({"allowed_token_ids": [A, B], "bad_words": ["aa", "bb", "aba", "bab"]}, id="two letters"),
]


@pytest.mark.parametrize("fields", LATER)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_it_ends_alone_with_what_it_has(llm, fields, temperature):
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    own = SamplingParams(temperature=temperature, seed=1, max_tokens=6, ignore_eos=True, logprobs=1, **fields)
    clean = generate(llm, PROMPTS, plain)
    broken = generate(llm, PROMPTS, [plain, own, plain])
    assert [broken[0].outputs, broken[2].outputs] == [clean[0].outputs, clean[2].outputs]
    (ended,) = broken[1].outputs
    assert (ended.finish_reason, ended.stop_reason) == ("error", "no_token_left")
    assert len(ended.token_ids) == len(ended.logprobs) == 2 and ended.cumulative_logprob < 0
    assert ended.text == llm.get_tokenizer().decode(ended.token_ids)
    assert f"request {broken[1].request_id}: no token can be sampled" in ended.error
    assert is_empty(llm)


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"prompt_logprob_token_ids": [A, B]}])
def test_the_prompt_is_read_all_the_same(llm, fields):
    prompt = byte_ids("the stop that has no answer")
    (plain,) = generate(llm, [prompt], SamplingParams(max_tokens=0, **fields))
    (ended,) = generate(llm, [prompt], SamplingParams(logits_processors=[nothing], **fields))
    assert ended.outputs[0].stop_reason == "no_token_left"
    assert len(ended.prompt_logprobs) == len(prompt) and ended.prompt_logprobs == plain.prompt_logprobs


def test_siblings_go_on(llm):
    """Samples that can go on do."""

    def end_after_a(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.fill_(-torch.inf) if output_ids[:1] == [A] else logits

    fields = {"allowed_token_ids": [A, B], "logits_processors": [end_after_a], "max_tokens": 5, "seed": 3}
    (output,) = generate(llm, PROMPTS[:1], SamplingParams(n=8, **fields))
    lengths = {len(each.token_ids) for each in output.outputs if each.finish_reason == "error"}
    assert lengths == {1}
    others = [each for each in output.outputs if each.finish_reason == "length"]
    assert 0 < len(others) < 8 and all(len(each.token_ids) == 5 and each.error is None for each in others)
    (best,) = generate(llm, PROMPTS[:1], SamplingParams(n=2, best_of=8, **fields))
    assert {each.finish_reason for each in best.outputs} == {"length"}
    assert is_empty(llm)


def test_its_prefix_stays_cached(llm):
    """The model's results were sound."""
    long = byte_ids("a text of more than two blocks of tokens.")
    own = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[A], bad_words=["aa"])
    assert generate(llm, [long], own)[0].outputs[0].stop_reason == "no_token_left"
    (again,) = generate(llm, [long], SamplingParams(max_tokens=1))
    assert again.num_cached_tokens >= 32


CONTRADICTION = {"allowed_token_ids": [EOS], "min_tokens": 1}


class TestNothingIsDrawn:
    def test_raw_readings_are_answered(self, llm):
        fields = {"max_tokens": 0, "logprob_token_ids": [A, B], "logprobs": 2}
        plain, own = generate(llm, [PROMPTS[1]] * 2, [SamplingParams(**fields), words(**fields)])
        assert own.outputs == plain.outputs and own.outputs[0].error is None

    def test_processed_ones_do_not_exist(self, llm):
        for mode in ("processed_logprobs", "processed_logits"):
            with pytest.raises(VLLMValidationError, match="allowed_token_ids and bad_words"):
                generate(llm, PROMPTS[:1], words(max_tokens=0, logprobs=1, logprobs_mode=mode))
        fails = SamplingParams(
            max_tokens=0,
            logprobs=1,
            logprobs_mode="processed_logprobs",
            logits_processors=[lambda ids, logits: logits.fill_(-torch.inf)],
        )
        (output,) = generate(llm, PROMPTS[:1], fails)
        assert output.outputs[0].stop_reason == "no_token_left"

    def test_given_continuations_are_read(self, llm):
        fields = {"trace_decode_token_ids": [A, B, A], "logprobs": 1}
        plain, own = generate(
            llm, [PROMPTS[1]] * 2, [SamplingParams(**fields), SamplingParams(**fields, **CONTRADICTION)]
        )
        assert own.outputs == plain.outputs and np.isfinite(own.outputs[0].cumulative_logprob)


def words(**fields) -> SamplingParams:
    """With an allowed token that is a bad word."""
    return SamplingParams(allowed_token_ids=[A], bad_words=["a"], **fields)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (CONTRADICTION, "allowed_token_ids and min_tokens"),
        ({**CONTRADICTION, "ignore_eos": True}, "allowed_token_ids and min_tokens"),
        ({"allowed_token_ids": [A, B], "bad_words": ["b", "a"]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [A, EOS], "bad_words": ["a"], "min_tokens": 2}, "bad_words and min_tokens"),
    ],
)
def test_contradictions_are_refused_before_anything_is_queued(llm, fields, names):
    plain = SamplingParams(max_tokens=2)
    for n in (1, 2):
        with pytest.raises(VLLMValidationError, match=names) as caught:
            generate(llm, PROMPTS[:2], [plain, SamplingParams(n=n, max_tokens=4, **fields)])
        assert caught.value.parameter == "allowed_token_ids"
    assert is_empty(llm)
