"""ModelConfig of a model's name alone reads the rest from its folder."""

from __future__ import annotations

import pytest

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config


def test_the_folder_says_what_is_left_out(folder):
    config = ModelConfig(str(folder))
    assert (config.path, config.tokenizer) == (str(folder), str(folder))
    assert config.dtype in ("float32", "bfloat16", "float16")
    assert config.max_model_len == config.hf_config.max_context_len
    assert config.get_vocab_size() == config.vocab_size == config.hf_text_config.vocab_size
    assert config.get_hidden_size() == config.hf_config.hidden_size
    assert (config.architecture, config.runner_type) == ("LlamaForCausalLM", "generate")
    assert not config.is_multimodal_model and not config.is_encoder_decoder
    assert cached_tokenizer_from_config(config).encode("a")


def test_what_is_given_counts(folder):
    config = ModelConfig(str(folder), tokenizer="other", dtype="float16", max_model_len=7)
    assert (config.tokenizer, config.dtype, config.max_model_len) == ("other", "float16", 7)


def test_a_model_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="no/such-model"):
        ModelConfig("no/such-model")


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=r"config\.json"):
        ModelConfig(str(tmp_path))
