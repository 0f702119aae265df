"""Users' view of each step: output kinds, samples put together, readings that stay what they were."""

from __future__ import annotations

import numpy as np
import pytest
from byte_tokenizer import EOS, byte_ids, make_byte_tokenizer

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.logprobs.lists import LogprobsLists, LogprobsRow
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.messages import EngineCoreOutput

KINDS = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def row(token_id: int, logprob: float) -> LogprobsRow:
    """A reading of the sampled token alone."""
    column = np.array([[logprob]], np.float32)
    ids, ranks = np.array([[token_id]], np.int32), np.array([[1]], np.int32)
    return (LogprobsLists(ids, column, column, ranks, np.zeros(1, np.float32), 0), 0)


def run(tokenizer, params: SamplingParams, text: str, finish="length", readings=False):
    """One request that generates `text` byte by byte; its outputs, and what the core must abort."""
    processor = OutputProcessor(tokenizer)
    processor.add_request("r", ProcessedPrompt("prompt", [1], None), params, 0.0)
    outputs, aborts = [], []
    ids = byte_ids(text)
    for index, token_id in enumerate(ids):
        last = index == len(ids) - 1
        news = EngineCoreOutput("r", [token_id], finish_reason=finish if last else None)
        if readings:
            news.logprobs = [row(token_id, -float(index))]
        processed = processor.process_outputs([news])
        outputs += processed.request_outputs
        aborts += processed.requests_to_abort
        if aborts:
            break
    assert not processor.has_unfinished_requests() and not processor._by_core_id
    return outputs, aborts


@pytest.mark.parametrize("stop", [[], ["stop"]])
def test_output_kinds_tell_one_story(tokenizer, stop):
    told = {}
    for kind in KINDS:
        params = SamplingParams(max_tokens=99, output_kind=kind, stop=stop, logprobs=0)
        outputs, _ = run(tokenizer, params, "a 🙂 sto, b stop now", readings=True)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        completions = [output.outputs[0] for output in outputs]
        if kind is RequestOutputKind.DELTA:
            assert all(len(each.token_ids) == len(each.logprobs) == 1 for each in completions)
            text = "".join(each.text for each in completions)
            token_ids = [token for each in completions for token in each.token_ids]
            readings = [entry for each in completions for entry in each.logprobs]
        else:
            text, token_ids = completions[-1].text, completions[-1].token_ids
            readings = list(completions[-1].logprobs)
        assert len(completions) == (1 if kind is RequestOutputKind.FINAL_ONLY else len(token_ids))
        last = completions[-1]
        told[kind] = (
            text,
            token_ids,
            readings,
            last.cumulative_logprob,
            last.finish_reason,
            last.stop_reason,
        )
    assert told[KINDS[0]] == told[KINDS[1]] == told[KINDS[2]]
    assert told[KINDS[0]][0] == ("a 🙂 sto, b " if stop else "a 🙂 sto, b stop now")
    assert told[KINDS[0]][4:] == (("stop", "stop") if stop else ("length", None))


def test_an_output_stays_what_it_was_when_the_request_goes_on(tokenizer):
    params = SamplingParams(max_tokens=99, logprobs=0, output_kind=RequestOutputKind.CUMULATIVE)
    outputs, _ = run(tokenizer, params, "four", readings=True)
    for count, output in enumerate(outputs, 1):
        completion = output.outputs[0]
        assert (len(completion.token_ids), len(completion.logprobs), len(completion.text)) == (
            count,
            count,
            count,
        )
        assert completion.cumulative_logprob == -sum(range(count))
        assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids


def test_a_stop_string_ends_the_core_unless_it_has_ended_itself(tokenizer):
    params = SamplingParams(max_tokens=99, stop=["b"])
    outputs, aborts = run(tokenizer, params, "abc")
    assert (aborts, outputs[-1].outputs[0].finish_reason) == (["r"], "stop")
    outputs, aborts = run(tokenizer, params, "ab")
    assert (aborts, outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == (
        [],
        "stop",
        "b",
    )


def test_the_end_of_sequence_token_is_an_id_but_no_text(tokenizer):
    processor = OutputProcessor(tokenizer)
    processor.add_request(
        "r", ProcessedPrompt(None, [1], None), SamplingParams(max_tokens=9, skip_special_tokens=False), 0.0
    )
    processor.process_outputs([EngineCoreOutput("r", byte_ids("ab"))])
    (output,) = processor.process_outputs([EngineCoreOutput("r", [EOS], finish_reason="stop")]).request_outputs
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("ab", [*byte_ids("ab"), EOS])
    assert (completion.finish_reason, completion.stop_reason, output.finished) == ("stop", None, True)


def test_without_detokenizing_there_is_no_text(tokenizer):
    params = SamplingParams(max_tokens=9, detokenize=False, logprobs=0)
    for own in (tokenizer, None):
        outputs, _ = run(own, params, "ab", readings=True)
        completion = outputs[-1].outputs[0]
        assert (completion.text, completion.token_ids) == ("", byte_ids("ab"))
        assert [entry.decoded_token for position in completion.logprobs for entry in position.values()] == [None] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_one_request_stay_in_order(tokenizer, kind):
    processor = OutputProcessor(tokenizer)
    children = processor.add_request(
        "r", ProcessedPrompt(None, [1], None), SamplingParams(n=3, max_tokens=9, output_kind=kind), 0.0
    )
    core_ids = [core_id for core_id, _ in children]
    assert len(set(core_ids)) == 3 and all(child.n == 1 for _, child in children)

    def step(*news: tuple[int, str, str | None]):
        outputs = [
            EngineCoreOutput(core_ids[i], byte_ids(text), finish_reason=finish, num_cached_tokens=4)
            for i, text, finish in news
        ]
        return processor.process_outputs(outputs).request_outputs

    first = step((2, "x", None), (0, "y", None))
    middle = step((2, "x", "length"), (1, "z", "length"))
    (last,) = step((0, "y", "length"))
    assert last.finished and last.num_cached_tokens == 4
    if kind is RequestOutputKind.FINAL_ONLY:
        assert first == middle == []
    if kind is RequestOutputKind.DELTA:
        assert [(each.index, each.text) for each in last.outputs] == [(0, "y")]
        assert [(each.index, each.text) for each in first[0].outputs] == [(2, "x"), (0, "y")]
    else:
        assert [(each.index, each.text) for each in last.outputs] == [(0, "yy"), (1, "z"), (2, "xx")]
    assert not processor.has_unfinished_requests()


def test_ids_in_use_are_refused_and_samples_take_none_from_others(tokenizer):
    processor = OutputProcessor(tokenizer)
    one, several = SamplingParams(max_tokens=9), SamplingParams(n=2, max_tokens=9)
    first = processor.add_request("r", ProcessedPrompt(None, [1], None), several, 0.0)
    with pytest.raises(VLLMValidationError, match="request_id 'r' is in use"):
        processor.add_request("r", ProcessedPrompt(None, [1], None), one, 0.0)
    # Whatever samples are called inside, a request of that name is either refused or kept apart.
    with pytest.raises(VLLMValidationError, match="in use"):
        processor.add_request(first[0][0], ProcessedPrompt(None, [1], None), one, 0.0)
    assert processor.abort_requests(["r", "r", "nobody"]) == [core_id for core_id, _ in first]
    processor.add_request(first[0][0], ProcessedPrompt(None, [1], None), one, 0.0)
    with pytest.raises(VLLMValidationError, match="in use"):
        processor.add_request("r", ProcessedPrompt(None, [1], None), several, 0.0)
    assert processor.num_unfinished_requests == 1


def test_an_error_ends_its_sample_alone(tokenizer):
    processor = OutputProcessor(tokenizer)
    children = processor.add_request(
        "r", ProcessedPrompt(None, [1], None), SamplingParams(n=2, max_tokens=9, stop=["q"]), 0.0
    )
    news = [
        EngineCoreOutput(children[0][0], [], finish_reason="error", error="broken"),
        EngineCoreOutput(children[1][0], byte_ids("ok"), finish_reason="length"),
    ]
    (output,) = processor.process_outputs(news).request_outputs
    assert [(each.finish_reason, each.error, each.text) for each in output.outputs] == [
        ("error", "broken", ""),
        ("length", None, "ok"),
    ]
