"""A user's view of one request: kinds of output, kept stop strings, special tokens, no text at all."""

from __future__ import annotations

import itertools

import pytest
from byte_tokenizer import BOS, EOS, PAD, byte_ids
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import CompletionOutput, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

KINDS = tuple(RequestOutputKind)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> LLMEngine:
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("tiny"))).llm_engine


def run(engine: LLMEngine, **fields) -> list[CompletionOutput]:
    """Every output of one request that says letters, spaces and special tokens at random."""
    bias = {token: 100 for token in (*byte_ids("ab "), PAD, BOS)}
    params = SamplingParams(**{"seed": 5, "max_tokens": 60, "ignore_eos": True, "logit_bias": bias, **fields})
    engine.add_request("r", "once", params)
    completions = []
    while engine.has_unfinished_requests():
        completions += [output.outputs[0] for output in engine.step()]
    return completions


def whole(completions: list[CompletionOutput], kind: RequestOutputKind) -> tuple[str, list[int]]:
    if kind is not RequestOutputKind.DELTA:
        return completions[-1].text, completions[-1].token_ids
    return "".join(each.text for each in completions), [token for each in completions for token in each.token_ids]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("included", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_in_every_kind_of_output(engine, kind, included, skip):
    (free,) = run(engine, output_kind=RequestOutputKind.FINAL_ONLY, skip_special_tokens=skip)
    stop = free.text[9:13]
    expected = free.text[: free.text.index(stop) + (4 if included else 0)]
    fields = {"stop": [stop], "include_stop_str_in_output": included, "skip_special_tokens": skip}
    completions = run(engine, output_kind=kind, **fields)
    text, token_ids = whole(completions, kind)
    assert text == expected and token_ids == free.token_ids[: len(token_ids)] and 0 < len(token_ids) < 60
    assert (completions[-1].finish_reason, completions[-1].stop_reason) == ("stop", stop)
    assert all(each.finish_reason is None for each in completions[:-1])
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(completions) == 1
    elif kind is RequestOutputKind.CUMULATIVE:
        # Nothing is taken back that a user has seen.
        assert all(later.text.startswith(each.text) for each, later in itertools.pairwise(completions))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("included", [True, False])
def test_the_token_that_ends_shows_only_when_asked(engine, kind, included):
    always = {"logit_bias": {EOS: 100}, "temperature": 0, "ignore_eos": False}
    completions = run(
        engine, **always, output_kind=kind, include_stop_str_in_output=included, skip_special_tokens=False
    )
    assert whole(completions, kind) == ("</s>" if included else "", [EOS])
    assert completions[-1].finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_without_detokenizing_all_but_text_is_the_same(engine, kind):
    with_text = run(engine, output_kind=kind, logprobs=2)
    without = run(engine, output_kind=kind, logprobs=2, detokenize=False)
    assert len(without) == len(with_text) > 0
    for one, other in zip(without, with_text, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == ("", other.token_ids, other.finish_reason)
        assert [list(position) for position in one.logprobs] == [list(position) for position in other.logprobs]
        assert all(entry.decoded_token is None for position in one.logprobs for entry in position.values())
    assert any(each.text for each in with_text)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_stand_side_by_side_where_nothing_puts_spaces_between(engine, kind):
    shown = {spaces: run(engine, output_kind=kind, skip_special_tokens=False, spaces_between_special_tokens=spaces)
             for spaces in (True, False)}  # fmt: skip
    text, token_ids = whole(shown[True], kind)
    assert whole(shown[False], kind) == (text, token_ids)
    names = {
        PAD: "<pad>",
        BOS: "<s>",
        **{token: chr(byte) for byte, token in zip(b"ab ", byte_ids("ab "), strict=True)},
    }
    assert text == "".join(names[token] for token in token_ids)
    (skipped,) = run(engine, output_kind=RequestOutputKind.FINAL_ONLY)
    assert skipped.text == "".join(names[token] for token in token_ids if token not in (PAD, BOS))
