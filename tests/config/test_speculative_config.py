"""How drafts are asked for: upstream's dict, resolved; what is not done is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

import vllm.config.speculative as speculative
from vllm import EngineArgs
from vllm.config import SpeculativeConfig
from vllm.config.speculative import as_speculative_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.fixture(autouse=True)
def all_methods(monkeypatch):
    monkeypatch.setattr(speculative, "SERVED_METHODS", frozenset(speculative.METHODS))


@pytest.mark.parametrize("value", [None, "", {}, "{}"])
def test_nothing_asked_for(value):
    assert as_speculative_config(value) is None


@pytest.mark.parametrize("kind", [dict, SpeculativeConfig, lambda **own: json.dumps(own)])
def test_every_way_to_give_it(kind):
    given = kind(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3)
    config = as_speculative_config(given)
    assert (config.method, config.num_speculative_tokens) == ("ngram", 4)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)


@pytest.mark.parametrize(
    ("given", "lookups"),
    [({}, (5, 5)), ({"prompt_lookup_min": 2}, (2, 2)), ({"prompt-lookup-min": 2, "prompt-lookup-max": 4}, (2, 4))],
)
def test_lengths_that_are_looked_up(given, lookups):
    config = as_speculative_config({"method": "ngram", "num_speculative_tokens": 4} | given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lookups


def test_methods_by_what_is_given():
    assert as_speculative_config({"model": "[ngram]", "num_speculative_tokens": 1}).method == "ngram"
    assert as_speculative_config({"model": "folder", "num_speculative_tokens": 1}).method == "draft_model"
    for method in ("mtp", "deepseek_mtp", "qwen3_next_mtp", "mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_5_mtp"):
        assert as_speculative_config({"method": method, "num_speculative_tokens": 1}).method == "mtp"
    assert as_speculative_config({"method": "suffix"}).num_speculative_tokens == 24
    assert as_speculative_config({"method": "suffix", "suffix_decoding_max_tree_depth": 9}).num_speculative_tokens == 9


@pytest.mark.parametrize("method", speculative._INSTEAD)
def test_methods_that_are_not_done_say_what_to_do(method):
    with pytest.raises(VLLMValidationError, match=f"speculative_config: method='{method}' is not supported: .{{20}}"):
        as_speculative_config({"method": method, "num_speculative_tokens": 2})


def test_a_method_without_a_drafter_is_refused(monkeypatch):
    monkeypatch.setattr(speculative, "SERVED_METHODS", frozenset())
    with pytest.raises(VLLMValidationError, match="method='suffix' is not supported"):
        as_speculative_config({"method": "suffix"})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "guess", "num_speculative_tokens": 2}, "method must be one of ngram, suffix"),
        ({"num_speculative_tokens": 2}, "method must be one of"),
        ({"method": "ngram"}, "num_speculative_tokens is needed"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "model, the draft's folder, is needed"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens must be an integer"),
        ({"method": "ngram", "num_speculative_tokens": "2"}, "num_speculative_tokens must be a number"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be a number"),
        ({"method": "ngram", "num_speculative_tokens": 2, "tokens": 3}, "no field 'tokens'"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "at most"),
        ({"method": "ngram", "num_speculative_tokens": 2, "disable_by_batch_size": 0}, "disable_by_batch_size"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob=1.5"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth"),
        ({"method": "suffix", "rejection_sample_method": "block"}, "rejection_sample_method='block' is not"),
        ({"method": "suffix", "draft_sample_method": "probabilistic"}, "draft_sample_method='probabilistic' is not"),
        ({"method": "suffix", "parallel_drafting": True}, "parallel_drafting=True is not"),
        ({"method": "suffix", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 must be"),
        ({"method": "suffix", "num_speculative_tokens_per_batch_size": [(4, 1, 2)]}, "first <= last"),
        ([3], "must be a SpeculativeConfig or a dict"),
    ],
)
def test_bad_values_are_named(given, named):
    with pytest.raises(VLLMValidationError, match=named):
        as_speculative_config(given)


def test_neutral_values_pass():
    neutral = {item.name: item.default for item in fields(SpeculativeConfig)}
    neutral |= {"enforce_eager": True, "disable_padded_drafter_batch": True, "draft_tensor_parallel_size": 2}
    config = as_speculative_config(neutral | {"method": "suffix"}, tensor_parallel_size=2)
    assert config.method == "suffix"


def test_tokens_by_running_requests():
    given = {"method": "ngram", "num_speculative_tokens": 6, "disable_by_batch_size": 20}
    config = as_speculative_config(given | {"num_speculative_tokens_per_batch_size": [[1, 4, 8], [5, 9, 3]]})
    assert [config.tokens_at(size) for size in (1, 4, 5, 9, 10, 19, 20, 200)] == [6, 6, 3, 3, 6, 6, 0, 0]


def test_flags():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'])
    assert EngineArgs.from_cli_args(given).create_speculative_config().num_speculative_tokens == 3
    given = parser.parse_args(["--spec-method", "suffix", "--spec-tokens", "7"])
    config = EngineArgs.from_cli_args(given).create_speculative_config()
    assert (config.method, config.num_speculative_tokens) == ("suffix", 7)
    given = parser.parse_args(["--spec-model", "folder", "--spec-tokens", "2"])
    assert EngineArgs.from_cli_args(given).create_speculative_config().model == "folder"


def test_one_setting_given_twice():
    args = EngineArgs(speculative_config={"method": "suffix"}, spec_method="ngram")
    with pytest.raises(ValueError, match="method='suffix' is given as 'ngram', too"):
        args.create_speculative_config()
