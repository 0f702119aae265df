"""Readings that a caller puts together."""

from __future__ import annotations

import pickle

import pytest

from vllm.logprobs import (
    FlatLogprobs,
    Logprob,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)

FIRST = {5: Logprob(-0.5, 3, "e")}
SECOND = {7: Logprob(-0.25, 9, "g"), 8: Logprob(-1.5, 1, "h")}


def _add(readings, position, rank, num_logprobs=-1) -> None:
    texts = [each.decoded_token for each in position.values()]
    append_logprobs_for_next_position(
        readings, list(position), [each.logprob for each in position.values()], texts, rank, num_logprobs
    )


@pytest.mark.parametrize("flat", [False, True])
def test_positions_are_added_with_the_sampled_tokens_rank_first(flat):
    readings = create_sample_logprobs(flat)
    assert isinstance(readings, FlatLogprobs if flat else list) and len(readings) == 0
    _add(readings, FIRST, 3)
    _add(readings, SECOND, 9)
    assert list(readings) == [FIRST, SECOND]
    _add(readings, SECOND, 9, num_logprobs=0)
    assert list(readings[2]) == [7], "only the sampled token has a place"


def test_a_prompts_first_token_has_no_readings():
    assert create_prompt_logprobs(False) == [None]
    assert list(create_prompt_logprobs(True)) == [{}]


def test_flat_readings_are_lists_of_all_entries():
    readings = create_sample_logprobs(True)
    readings.extend([FIRST, SECOND])
    assert (readings.start_indices, readings.end_indices) == ([0, 1], [1, 3])
    assert (readings.token_ids, readings.logprobs, readings.ranks) == ([5, 7, 8], [-0.5, -0.25, -1.5], [3, 9, 1])
    assert readings.decoded_tokens == ["e", "g", "h"]


def test_parts_of_flat_readings_begin_at_zero():
    readings = create_sample_logprobs(True)
    readings.extend([FIRST, SECOND])
    part = readings[-1:]
    assert (part.start_indices, part.end_indices, list(part)) == ([0], [2], [SECOND])
    assert readings[-1] == SECOND and len(readings[5:]) == 0
    readings.extend(readings)
    assert list(readings) == [FIRST, SECOND] * 2


def test_what_they_do_not_do_is_refused():
    readings = create_sample_logprobs(True)
    readings.append(FIRST)
    for change in (lambda: readings.insert(0, FIRST), lambda: readings.__setitem__(0, FIRST), readings.pop):
        with pytest.raises(TypeError, match="grow at their end"):
            change()
    with pytest.raises(TypeError, match="is a result"):
        _add(FlatLogprobs(None), FIRST, 1)


def test_callers_make_their_own():
    readings = FlatLogprobs()
    assert isinstance(readings, FlatLogprobs) and readings.token_ids == []
    readings.append(FIRST)
    readings.extend([SECOND])
    assert (list(readings), readings.end_indices) == ([FIRST, SECOND], [1, 3])
    again = FlatLogprobs(
        start_indices=[0], end_indices=[1], token_ids=[5], logprobs=[-0.5], ranks=[3], decoded_tokens=["e"]
    )
    assert list(again) == [FIRST]


def test_the_engines_results_are_pickled_as_they_are():
    result = FlatLogprobs(None)
    assert type(pickle.loads(pickle.dumps(result))) is type(result) is FlatLogprobs
