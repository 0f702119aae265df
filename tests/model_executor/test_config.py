"""config.json without transformers: values, defaults and errors against transformers' own classes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models_util import ARCHITECTURES

from vllm.transformers_utils.config import HFConfig, load_hf_config, parse_hf_config

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def parse(generation: dict[str, Any] | None = None, /, **fields: Any) -> HFConfig:
    raw = {name: value for name, value in (MINIMAL | fields).items() if value is not ...}
    return parse_hf_config(raw, generation or {}, "some-model/config.json")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_defaults_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "num_hidden_layers": 2}
    if arch != "opt":
        sizes["num_key_value_heads"] = 2
    theirs = CONFIG_MAPPING[arch](**sizes)
    theirs.save_pretrained(tmp_path)
    saved = load_hf_config(tmp_path)
    # And with everything left out that has a default.
    bare = sizes | {
        "model_type": arch,
        "ffn_dim": 10,
        "intermediate_size": 10,
        "max_position_embeddings": 2048,
    }
    for mine in (saved, parse_hf_config(bare, {})):
        assert mine.tie_word_embeddings == theirs.tie_word_embeddings
        assert mine.num_key_value_heads == getattr(theirs, "num_key_value_heads", 4)
        assert mine.head_dim == (getattr(theirs, "head_dim", None) or 16)
        assert mine.sliding_window == getattr(theirs, "sliding_window", None)
        assert mine.attention_bias == getattr(theirs, "attention_bias", False)
        if arch == "opt":
            assert mine.word_embed_proj_dim == 64 and mine.hidden_act == "relu" and mine.do_layer_norm_before
        else:
            assert mine.hidden_act == theirs.hidden_act and mine.rms_norm_eps == theirs.rms_norm_eps
            assert mine.rope.rope_type == "default"


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"some-model/config.json has no {field}"):
        parse(**{field: ...})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "64", "hidden_size must be a positive integer, got '64'"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a positive integer, got 0"),
        ("vocab_size", True, "vocab_size must be a positive integer, got True"),
        ("rms_norm_eps", "x", "rms_norm_eps must be a number, got 'x'"),
        ("tie_word_embeddings", 1, "tie_word_embeddings must be true or false, got 1"),
        ("num_key_value_heads", 3, "num_attention_heads must be a multiple of num_key_value_heads=3, got 4"),
        ("rope_scaling", {"rope_type": "longrope"}, "rope_type must be one of .* got 'longrope'"),
        ("rope_scaling", {"rope_type": "linear"}, "rope_parameters of type linear has no factor"),
        ("rope_scaling", [1], r"rope_parameters must be an object, got \[1\]"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor must be 1.0, got 0.5"),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="some-model/config.json: " + message):
        parse(**{field: value})


def test_files_that_are_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path.name} has no config.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"^{tmp_path.name}/config.json is not JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=f"^{tmp_path.name}/config.json must hold an object, got list"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "rope_type", "theta", "params"),
    [
        ({}, "default", 10000.0, {}),
        ({"rope_theta": 5e5}, "default", 5e5, {}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "linear",
            5e5,
            {"factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}},
            "default",
            1e6,
            {},
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2, "alpha": None}},
            "dynamic",
            1e4,
            {"factor": 2},
        ),
    ],
)
def test_rope_old_and_new_style(fields: dict[str, Any], rope_type: str, theta: float, params: dict[str, Any]) -> None:
    rope = parse(**fields).rope
    assert (rope.rope_type, rope.theta, rope.params) == (rope_type, theta, params)


def test_context_length() -> None:
    assert parse().max_context_len == 128
    assert parse(rope_scaling={"type": "linear", "factor": 4.0}).max_context_len == 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse(rope_scaling=yarn).max_context_len == 512
    assert parse(rope_scaling=yarn, max_position_embeddings=512).max_context_len == 512
    assert parse(rope_scaling={"rope_type": "dynamic", "factor": 4.0}).max_context_len == 128


def test_sliding_window() -> None:
    assert parse(model_type="mistral", sliding_window=32).max_context_len == 32
    assert parse(model_type="mistral", sliding_window=None).max_context_len == 128
    assert parse(model_type="llama", sliding_window=32).max_context_len == 128
    qwen = {"model_type": "qwen2", "sliding_window": 32}
    assert parse(**qwen).max_context_len == 128
    assert parse(**qwen, use_sliding_window=True, max_window_layers=2).max_context_len == 128
    assert parse(**qwen, use_sliding_window=True, max_window_layers=1).max_context_len == 32


def test_special_ids_and_recommended_sampling() -> None:
    generation = {"eos_token_id": [7, 2], "bos_token_id": 9, "temperature": 0.6, "top_k": None, "top_p": 0.9}
    config = parse(generation, eos_token_id=2, bos_token_id=1)
    assert config.eos_token_ids == (2, 7) and config.bos_token_id == 9
    assert config.default_sampling_params == {"temperature": 0.6, "top_p": 0.9}
    bare = parse(eos_token_id=[3, 4])
    assert bare.eos_token_ids == (3, 4) and bare.bos_token_id is None and bare.default_sampling_params == {}


def test_dtype_names() -> None:
    assert parse(torch_dtype="bfloat16").dtype == "bfloat16"
    assert parse(dtype="torch.float16").dtype == "float16"
    assert parse(dtype="float64").dtype is None and parse().dtype is None


def test_overrides(tmp_path: Path) -> None:
    new_style = MINIMAL | {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}
    (tmp_path / "config.json").write_text(json.dumps(new_style))
    assert load_hf_config(tmp_path, {"max_position_embeddings": 64}).max_position_embeddings == 64
    assert load_hf_config(tmp_path, {"rope_theta": 7.0}).rope.theta == 7.0
    scaled = load_hf_config(tmp_path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}).rope
    assert (scaled.rope_type, scaled.theta, scaled.params) == ("linear", 3e4, {"factor": 2.0})


def test_reading_a_configuration_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, vllm.transformers_utils.config, vllm.tokenizers.tokenizer; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
