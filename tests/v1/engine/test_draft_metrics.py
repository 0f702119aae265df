"""Drafting by n-grams and suffixes from end to end: the same tokens, and counts of what was drafted."""

from __future__ import annotations

import pytest
from tiny_llm import make_tiny_llm

from vllm import SamplingParams
from vllm.outputs import RequestSpecDecodeMetrics

PROMPTS = ["abcabcabcabcab", "the cat sat on the mat, the cat sat on the", "x"]
ALWAYS = {"num_speculative_tokens_per_batch_size": [(1, 64, 6)]}
METHODS = [
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4, **ALWAYS},
    {"method": "suffix", "suffix_decoding_max_tree_depth": 6, **ALWAYS},
]


@pytest.fixture(scope="module")
def plain(folder):
    return make_tiny_llm(folder)


def generate(llm, **fields):
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprob_token_ids=[5, 9], **fields)
    return [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("config", METHODS, ids=lambda config: config["method"])
def test_tokens_readings_and_counts(folder, plain, config):
    llm = make_tiny_llm(folder, speculative_config=config, disable_log_stats=False)
    drafts = []
    # Greedy decoding's repetitions are copied; a suffix that earlier requests had is found.
    for fields in ({"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0}):
        for expected, found in zip(generate(plain, **fields), generate(llm, **fields), strict=True):
            assert found.token_ids == expected.token_ids
            assert found.logprobs == expected.logprobs
            assert expected.spec_decode_metrics is None
            if found.spec_decode_metrics is not None:
                drafts.append(found.spec_decode_metrics)
    accepted = [number for each in drafts for number in each.per_step_accepted]
    assert sum(accepted) > 10
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_drafts"].value == len(accepted)
    assert metrics["vllm:spec_decode_num_draft_tokens"].value == sum(each.num_draft_tokens for each in drafts)
    assert metrics["vllm:spec_decode_num_accepted_tokens"].value == sum(accepted)
    by_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert by_position == [sum(number > place for number in accepted) for place in range(len(by_position))]


def test_a_requests_counts():
    metrics = RequestSpecDecodeMetrics()
    assert metrics.to_dict()["mean_acceptance_length"] == 1.0
    for drafted, accepted in ((3, 1), (5, 5), (2, 0)):
        metrics.observe(drafted, accepted)
    assert metrics.to_dict() == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 0.6,
        "acceptance_histogram": [1, 1, 0, 0, 0, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 10,
        "num_spec_tokens": 5,
        "per_step_accepted": [1, 5, 0],
        "per_step_drafted": [3, 5, 2],
    }
