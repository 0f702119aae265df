"""`pooler_config` as an object, a dict or JSON: each field is honoured, at its neutral value changes nothing, or is
refused by name."""

from __future__ import annotations

import json

import pytest
import transformers
from tiny_encoders import SIZES, save

from vllm.config import PoolerConfig
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("bert"), transformers.BertConfig(**SIZES))


def configs(folder, given):
    for form in (given, json.dumps(given), PoolerConfig(**given)):
        yield EngineArgs(str(folder), pooler_config=form, skip_tokenizer_init=True).create_engine_config().model_config


@pytest.mark.parametrize("name", ["use_activation", "normalize", "softmax", "activation"])
@pytest.mark.parametrize("value", [None, False, True])
def test_names_of_use_activation(folder, name, value):
    assert [each.pooler_config.use_activation for each in configs(folder, {name: value})] == [value] * 3


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": None, "logit_mean": 0.0, "logit_sigma": 1.0},
        {"logit_bias": 0.0},
        {"enable_chunked_processing": False, "max_embed_len": None},
        {"tok_pooling_type": "ALL", "seq_pooling_type": "CLS"},
        {"pooling_type": "CLS", "seq_pooling_type": "CLS"},
    ],
    ids=str,
)
def test_neutral_values(folder, given):
    for each in configs(folder, given):
        assert each.pooling.modes == ("cls",) and each.pooler_config.use_activation is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"logit_bias": 0.5}, "logit_mean is for classify"),
        ({"logit_sigma": 0.0}, "logit_sigma must not be 0"),
        ({"normalize": True, "use_activation": True}, "normalize and use_activation are two names"),
        ({"pooling_type": "LAST", "seq_pooling_type": "CLS"}, "exclude each other"),
        ({"enable_chunked_processing": True, "task": "token_embed"}, "enable_chunked_processing is for embed"),
        ({"max_embed_len": 64, "task": "token_embed"}, "max_embed_len is for embed"),
        ({"max_embed_len": 0}, "max_embed_len must be at least 1"),
    ],
    ids=str,
)
def test_what_is_refused(folder, given, problem):
    with pytest.raises(ValueError, match=problem):
        next(configs(folder, given))
    with pytest.raises(ValueError, match="has no field 'other'"):
        EngineArgs(str(folder), pooler_config={"other": 1}, skip_tokenizer_init=True).create_engine_config()
