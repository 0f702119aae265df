"""repetition_detection ends a sequence that repeats itself; stream_interval puts streamed tokens together."""

from __future__ import annotations

import pytest
from byte_tokenizer import byte_ids
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind
from vllm.v1.engine.core_process.serial import decode_request, encode_request
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.request import check_sequence_repetition, repeats_itself

PROMPT = byte_ids("a prompt")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("tiny")), device="cpu")


@pytest.mark.parametrize(
    ("tokens", "sizes", "repeats"),
    [
        ([1, 2, 3] * 3, (3, 2, 3), True),
        ([1, 2, 3] * 2, (3, 2, 3), False),
        ([9, 1, 2, 1, 2], (5, 2, 2), True),
        ([1, 2, 1, 2, 9], (5, 1, 2), False),
        ([1, 2, 3, 1, 2, 3, 1, 2, 4], (3, 1, 3), False),
        ([5, 7, 7], (1, 0, 2), True),
        ([7, 7, 7], (3, 2, 2), False),
        ([1, 2] * 4, (0, 0, 0), False),
        ([], (3, 1, 2), False),
    ],
)
def test_what_repeats_itself(tokens, sizes, repeats):
    params = RepetitionDetectionParams(*sizes)
    assert check_sequence_repetition(tokens, params) is repeats
    # The prompt's tokens do not count.
    assert repeats_itself([7, 8, *tokens], 2, params) is repeats
    assert not repeats_itself(tokens, len(tokens), params)
    assert not repeats_itself(tokens, 0, None)


@pytest.mark.parametrize("min_tokens", [0, 8])
def test_a_sequence_that_repeats_itself_ends(tiny, min_tokens):
    looping = SamplingParams(
        temperature=0,
        max_tokens=40,
        min_tokens=min_tokens,
        ignore_eos=True,
        logit_bias={70: 100},
        repetition_detection=RepetitionDetectionParams(2, 1, 3),
        logprobs=1,
    )
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias={70: 100})
    ended, whole = tiny.generate([PROMPT] * 2, [looping, plain], use_tqdm=False)
    (completion,) = ended.outputs
    assert completion.token_ids == [70] * max(3, min_tokens)
    assert (completion.finish_reason, completion.stop_reason) == ("repetition", "repetition_detected")
    assert len(completion.logprobs) == len(completion.token_ids)
    assert len(whole.outputs[0].token_ids) == 40 and whole.outputs[0].finish_reason == "length"
    assert is_empty(tiny)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_tokens_come_together(tiny, kind, num_sequences):
    fields = {"n": num_sequences, "seed": 1, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    (whole,) = tiny.generate([PROMPT], SamplingParams(**fields), use_tqdm=False)
    engine = tiny.llm_engine
    engine.add_request("r", PROMPT, SamplingParams(**fields, stream_interval=5, output_kind=kind))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    lengths = [[len(each.token_ids) for each in output.outputs] for output in outputs]
    if kind is RequestOutputKind.FINAL_ONLY:
        assert lengths == [[12] * num_sequences]
    elif kind is RequestOutputKind.CUMULATIVE:
        assert [own[0] for own in lengths] == [1, 6, 11, 12]
    else:
        tokens = {index: [] for index in range(num_sequences)}
        for output in outputs:
            for each in output.outputs:
                assert len(each.logprobs) == len(each.token_ids)
                tokens[each.index] += each.token_ids
        assert list(tokens.values()) == [each.token_ids for each in whole.outputs]
        assert [own[0] for own in lengths] == [1, 5, 5, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream_interval": -1}, "stream_interval must be at least 0"),
        ({"stream_interval": 1.5}, "stream_interval must be an integer"),
        ({"repetition_detection": 3}, "repetition_detection must be a RepetitionDetectionParams"),
        ({"repetition_detection": {"size": 3}}, "repetition_detection has no field 'size'"),
        ({"repetition_detection": {"max_pattern_size": "3"}}, "max_pattern_size must be an integer"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "min_count must be at least 2"),
        ({"repetition_detection": {"min_pattern_size": 3}}, "min_pattern_size <= max_pattern_size"),
    ],
)
def test_bad_values(fields, message):
    with pytest.raises(VLLMValidationError, match=message):
        SamplingParams(**fields)


def test_neutral_values_and_the_way_to_another_process():
    assert SamplingParams(repetition_detection=RepetitionDetectionParams()).repetition_detection is None
    params = SamplingParams(repetition_detection={"max_pattern_size": 3, "min_count": 2}, stream_interval=4)
    again = decode_request(encode_request(EngineCoreRequest("r", [1], params, frozenset(), 0.0))).sampling_params
    assert again == params and again.repetition_detection == RepetitionDetectionParams(3, 0, 2)
