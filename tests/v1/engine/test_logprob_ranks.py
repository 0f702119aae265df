"""`logprob_ranks=False`: the same readings without their ranks, whatever shares the batch."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from byte_tokenizer import VOCAB_SIZE
from models_util import random_prompts
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

IDS = [3, 9, 200, 17]
ASKED = [
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 4, "prompt_logprob_token_ids": IDS},
    {"prompt_logprob_token_ids": range(VOCAB_SIZE)},
    {"prompt_logprobs": -1},
    {"logprobs": 3, "logprob_token_ids": IDS},
    {"logprobs": -1},
    {"logprobs": 2, "seed": 1, "temperature": 1.0, "logprobs_mode": "processed_logprobs"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return make_tiny_llm(folder, device="cpu", max_logprobs=-1, max_logprob_token_ids=-1)


def readings_of(output):
    found = (output.prompt_logprobs, output.outputs[0].logprobs)
    return [each for each in found if each is not None]


def test_the_same_but_for_ranks_beside_requests_that_have_them(tiny):
    prompts = random_prompts(VOCAB_SIZE, (40, 23, 40, 31, 9, 12, 20), seed=3)
    params = [
        SamplingParams(**{"temperature": 0, "max_tokens": 3, **asked, "logprob_ranks": ranks})
        for asked in ASKED
        for ranks in (True, False)
    ]
    outputs = tiny.generate([prompt for prompt in prompts for _ in range(2)], params, use_tqdm=False)
    for whole, rankless in zip(outputs[::2], outputs[1::2], strict=True):
        assert whole.outputs[0].token_ids == rankless.outputs[0].token_ids
        for one, other in zip(readings_of(whole), readings_of(rankless), strict=True):
            for name in ("token_ids", "logprobs", "logits", "lse", "end_indices"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert one.ranks.min() >= 1 and not other.ranks.any()
            assert (one[-1].keys(), {entry.rank for entry in other[-1].values()}) == (other[-1].keys(), {None})
            assert all(entry.rank >= 1 for entry in one[-1].values())
            token = next(iter(other[-1]))
            assert other[-1][token].rank is None is pickle.loads(pickle.dumps(other))[-1][token].rank


def test_only_a_boolean():
    with pytest.raises(VLLMValidationError, match="logprob_ranks"):
        SamplingParams(logprob_ranks=0.5)
