"""Requests and outputs survive the way between two processes."""

from __future__ import annotations

import numpy as np
import pytest

from vllm import SamplingParams
from vllm.logprobs.lists import LogprobsLists, LogprobsRows
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core_process.serial import decode_outputs, decode_request, encode_outputs, encode_request
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0, "logprob_token_ids": range(30), "logprobs": 3, "logprobs_mode": "raw_logits"},
        {"stop": ["a", "ß"], "stop_token_ids": [4], "logit_bias": {5: 1.5}, "allowed_token_ids": [1, 5], "seed": -7},
        {"prompt_logprob_token_ids": [[1], [2, 3]], "prompt_logprob_start": 2, "max_tokens": 0},
        {"output_kind": RequestOutputKind.DELTA, "extra_args": {"a": [1, {"b": None}]}, "bad_words": ["x"]},
    ],
)
def test_requests(fields):
    params = SamplingParams(**fields)
    params.bad_words_token_ids = [[1, 2]] if params.bad_words else None
    request = EngineCoreRequest("r", [1, 2, 3], params, frozenset({2, 9}), 12.5, 3, "salt")
    again = decode_request(encode_request(request))
    assert again == request
    assert again.sampling_params.bad_words_token_ids == params.bad_words_token_ids
    assert again.sampling_params.logprob_token_ids_np.tolist() == list(fields.get("logprob_token_ids", ()))
    # Lists of two decoded requests are not one list.
    assert decode_request(encode_request(request)).sampling_params.stop is not again.sampling_params.stop


def make_lists(num_rows: int, width: int, entropy: bool) -> LogprobsLists:
    rng = np.random.default_rng(num_rows)
    ints = rng.integers(0, 1000, (2, num_rows, width)).astype(np.int32)
    floats = rng.normal(size=(2, num_rows, width)).astype(np.float32)
    lse = rng.normal(size=num_rows).astype(np.float32)
    return LogprobsLists(ints[0], floats[0], floats[1][:, ::-1], ints[1], lse, 2, lse + 1 if entropy else None)


def test_outputs_share_the_arrays_of_their_step():
    first, second = make_lists(4, 5, entropy=False), make_lists(3, 7, entropy=True)
    outputs = [
        EngineCoreOutput("a", [5], [(first, 2)], num_cached_tokens=16, scheduled_time=2.5),
        EngineCoreOutput("b", [6], [(first, 0)], "stop", "END", allowed_mass=[-0.5], num_drafted=3, num_accepted=2),
        EngineCoreOutput("c", [], None, "error", error="broken"),
        EngineCoreOutput("d", [], None, prompt_logprobs=[LogprobsRows(second, slice(0, 2), 3)]),
        EngineCoreOutput("e", [7], None, "stop", 17, prompt_logprobs=[LogprobsRows(second, slice(2, 3), 1)]),
    ]
    frames = encode_outputs(outputs, {"num_running": 3})
    assert len(frames) == 1 + 5 + 6
    again, extra = decode_outputs([bytes(frame) for frame in frames])
    assert extra == {"num_running": 3}
    assert [output.request_id for output in again] == list("abcde")
    assert again[0].logprobs[0][0] is again[1].logprobs[0][0]
    for one, other in zip(outputs, again, strict=True):
        for name in ("new_token_ids", "finish_reason", "stop_reason", "num_cached_tokens", "error", "scheduled_time"):
            assert getattr(one, name) == getattr(other, name)
        rows, twins = (each.logprobs or each.prompt_logprobs or () for each in (one, other))
        for row, twin in zip(rows, twins, strict=True):
            assert row[1:] == twin[1:]
            assert row[0].layout == twin[0].layout and row[0].has_entropy == twin[0].has_entropy
            for array, other_array in zip(row[0].arrays(), twin[0].arrays(), strict=True):
                np.testing.assert_array_equal(array, other_array)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_table_travels_as_one_frame(entropy: bool):
    lists = make_lists(3, 4, entropy)
    table = LogprobsLists.of_table(lists.table().copy(), lists.num_topk, entropy)
    frames = encode_outputs([EngineCoreOutput("a", [5], [(table, 2)]), EngineCoreOutput("b", [6], [(table, 0)])])
    assert len(frames) == 2
    again, _ = decode_outputs([bytes(frame) for frame in frames])
    (twin, row), (other, _) = again[0].logprobs[0], again[1].logprobs[0]
    assert row == 2 and twin is other and twin.layout == lists.layout and twin.has_entropy is entropy
    assert twin.first_logprob(1) == lists.logprobs[1, 0]
    for array, other_array in zip(lists.arrays(), twin.arrays(), strict=True):
        np.testing.assert_array_equal(array, other_array)


def test_nothing_is_an_output_too():
    assert decode_outputs(encode_outputs([])) == ([], None)
