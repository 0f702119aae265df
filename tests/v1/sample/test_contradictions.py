"""Constraints that leave no first token are refused, with the fields that contradict each other."""

from __future__ import annotations

import pytest

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import check_a_token_is_left

EOS, VOCAB_SIZE = {2, 3}, 12


def check(bad_words: list[list[int]] | None = None, **fields) -> None:
    params = SamplingParams(bad_words=["x"] if bad_words else None, **fields)
    params.bad_words_token_ids = bad_words
    check_a_token_is_left(params, EOS, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("fields", "parameter", "names"),
    [
        ({"allowed_token_ids": [5], "bad_words": [[5]]}, "allowed_token_ids", "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [5, 5, 6], "bad_words": [[5], [6], [7, 8]]}, "allowed_token_ids", "and bad_words"),
        ({"allowed_token_ids": [3], "min_tokens": 1}, "allowed_token_ids", "allowed_token_ids and min_tokens"),
        ({"allowed_token_ids": [3], "min_tokens": 1, "ignore_eos": True}, "allowed_token_ids", "and min_tokens"),
        ({"allowed_token_ids": [2, 9], "min_tokens": 1, "stop_token_ids": [9]}, "allowed_token_ids", "min_tokens"),
        (
            {"allowed_token_ids": [2, 5], "min_tokens": 1, "bad_words": [[5]]},
            "allowed_token_ids",
            "allowed_token_ids, bad_words and min_tokens",
        ),
        ({"bad_words": [[each] for each in range(VOCAB_SIZE)]}, "bad_words", "^bad_words leave"),
        ({"min_tokens": 1, "stop_token_ids": range(VOCAB_SIZE)}, "min_tokens", "^min_tokens leave"),
        ({"min_tokens": 1, "stop_token_ids": range(4, 12), "bad_words": [[0], [1]]}, "bad_words", "and min_tokens"),
    ],
)
def test_what_leaves_no_token(fields, parameter, names):
    with pytest.raises(VLLMValidationError, match=names) as caught:
        check(**fields)
    assert caught.value.parameter == parameter and "no token to generate" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [2], "stop_token_ids": [2]},
        {"allowed_token_ids": [2, 5], "min_tokens": 1},
        {"allowed_token_ids": [5, 6], "bad_words": [[5], [6, 6]]},
        {"allowed_token_ids": [5], "bad_words": [[5, 5]]},
        {"allowed_token_ids": [5], "logit_bias": {5: -100}},
        {"stop_token_ids": range(VOCAB_SIZE)},
        {"bad_words": [[each] for each in range(1, VOCAB_SIZE)]},
    ],
)
def test_what_leaves_one(fields):
    check(**fields)
