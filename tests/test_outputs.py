"""Outputs that callers make, read and join themselves."""

from __future__ import annotations

import numpy as np
import pytest

from vllm.logprobs import FlatLogprobs
from vllm.logprobs.lists import LogprobsLists
from vllm.outputs import CompletionOutput, RequestMetrics, RequestOutput


def _output(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("request", None, [1], None, list(completions), finished)


def _readings(token_id: int) -> FlatLogprobs:
    one = np.array([[token_id]], np.int32)
    values = np.full((1, 1), -1.0, np.float32)
    lse = np.zeros(1, np.float32)
    flat = FlatLogprobs(None)
    flat.append((LogprobsLists(one, values, values, one, lse, num_topk=0), 0), 0)
    return flat


def test_later_parts_are_joined_and_the_end_is_the_last_ones():
    whole = _output(CompletionOutput(0, "a", [1], -1.0, _readings(1)))
    before = whole.outputs[0].token_ids
    whole.add(_output(CompletionOutput(0, "b", [2], -3.0, _readings(2), finish_reason="length"), finished=True), True)
    (joined,) = whole.outputs
    assert (joined.text, joined.token_ids, joined.cumulative_logprob) == ("ab", [1, 2], -3.0)
    assert joined.logprobs is not None and [list(position) for position in joined.logprobs] == [[1], [2]]
    assert joined.finish_reason == "length" and whole.finished
    assert before == [1], "a list that a caller may hold is not changed"


def test_an_ended_part_stays_ended():
    whole = _output(CompletionOutput(0, "a", [1], finish_reason="stop", stop_reason="x"), finished=True)
    whole.add(_output(CompletionOutput(1, "b", [2])), aggregate=True)
    assert [each.index for each in whole.outputs] == [0, 1]
    assert whole.finished and whole.outputs[0].stop_reason == "x"


def test_whole_outputs_replace_earlier_ones():
    whole = _output(CompletionOutput(0, "a", [1]))
    whole.add(_output(CompletionOutput(0, "ab", [1, 2])), aggregate=False)
    assert (whole.outputs[0].text, whole.outputs[0].token_ids) == ("ab", [1, 2])


def test_unknown_arguments_are_named(monkeypatch: pytest.MonkeyPatch):
    warned: list[object] = []
    monkeypatch.setattr("vllm.outputs.warn_once", lambda logger, message, *args: warned.extend(args))
    output = RequestOutput("request", None, [1], added_in_a_later_version=1)
    assert output.outputs == [] and not hasattr(output, "added_in_a_later_version")
    assert warned == ["added_in_a_later_version"]


def test_what_this_engine_never_sets_can_be_read():
    completion, output = CompletionOutput(0, "", []), _output()
    names = ("routed_experts", "lora_request", "sampling_mask", "spec_decode_metrics", "weight_versions")
    assert [getattr(completion, name) for name in names] == [None] * len(names)
    assert output.encoder_prompt is output.kv_transfer_params is output.num_cache_creation_tokens is None


def test_times_have_upstreams_names_and_older_ones():
    metrics = RequestMetrics.arrived(10.0)
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time) == (None, None, None)
    metrics.begin(11.0, 12.5)
    assert (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts) == (10, 11, 12.5)
    assert metrics.first_token_latency == 2.5
    assert (metrics.first_scheduled_time, metrics.first_token_time) == (11, 12.5)
