"""tokenization_kwargs stand for our options."""

from __future__ import annotations

import pytest

from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.text_options import TextOptions, text_options


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        (None, TextOptions()),
        ({}, TextOptions()),
        ({"add_special_tokens": False}, TextOptions(False)),
        ({"truncate_prompt_tokens": 3}, TextOptions(True, True, 3)),
        ({"truncate_prompt_tokens": -1}, TextOptions(True, True, -1)),
        ({"truncation": True}, TextOptions(True, True, -1)),
        ({"truncation": True, "max_length": 3}, TextOptions(True, True, 3)),
        ({"truncation": "longest_first", "max_length": 3}, TextOptions(True, True, 3)),
        ({"truncation": "only_first", "max_length": 3}, TextOptions(True, True, 3)),
        ({"truncation": True, "truncate_prompt_tokens": 3}, TextOptions(True, True, 3)),
        ({"truncation": True, "truncate_prompt_tokens": 3, "max_length": 3}, TextOptions(True, True, 3)),
        ({"truncation": False, "max_length": 3}, TextOptions(True, True, None)),
        ({"truncation": "do_not_truncate", "max_length": 3}, TextOptions(True, True, None)),
        ({"truncation": False}, TextOptions(True, True, None)),
        ({"truncation_side": "right"}, TextOptions(truncation_side="right")),
        (
            {"padding": False, "padding_side": None, "return_tensors": None, "stride": 0, "verbose": True},
            TextOptions(),
        ),
        ({"padding": "do_not_pad", "truncation": None, "max_length": None}, TextOptions()),
    ],
)
def test_meanings(kwargs, expected):
    assert text_options(kwargs) == expected


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"padding": True}, "padding"),
        ({"padding": "max_length"}, "padding"),
        ({"return_tensors": "pt"}, "return_tensors"),
        ({"do_lower_case": True}, "do_lower_case"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"truncation": True, "max_length": 0}, "max_length"),
        ({"truncation": True, "max_length": 1.5}, "max_length"),
        ({"truncation": "only_second", "max_length": 3}, "truncation must be true or false"),
        ({"truncation": "yes"}, "truncation must be true or false"),
        ({"truncation_side": "top"}, "truncation_side"),
        ({"max_length": 3}, "max_length needs truncation=True"),
        ({"truncation": False, "truncate_prompt_tokens": 3}, "contradict"),
        ({"truncate_prompt_tokens": 3, "truncation": True, "max_length": 4}, "two lengths"),
        ("truncation", "must be a dict"),
    ],
)
def test_what_cannot_be_honoured(kwargs, problem):
    with pytest.raises(VLLMValidationError, match=problem):
        text_options(kwargs)


@pytest.mark.parametrize("kwargs", [{"truncation": "only_first"}, {"truncation_side": "left"}])
def test_pairs_lose_their_ends(kwargs):
    text_options(kwargs)
    with pytest.raises(VLLMValidationError, match=next(iter(kwargs))):
        text_options(kwargs, of_pairs=True)


@pytest.mark.parametrize("kind", [SamplingParams, PoolingParams])
def test_they_hold_in_place_of_the_parameters(kind):
    params = kind(truncate_prompt_tokens=5)
    assert text_options({"truncate_prompt_tokens": 3}).applied(params).truncate_prompt_tokens == 3
    assert text_options({"truncation": False}).applied(params).truncate_prompt_tokens is None
    assert text_options({"add_special_tokens": False}).applied(params) is params
    assert params.truncate_prompt_tokens == 5
    assert text_options({"truncation": True}).applied(None) is None
