"""config.json without transformers: values, defaults and errors against transformers' own classes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models_util import ARCHITECTURES

from vllm.config.checkpoint.config import HFConfig, RopeConfig, load_hf_config, parse_hf_config
from vllm.config.checkpoint.overrides import overridden_entries
from vllm.config.checkpoint.text_part import WHOLE
from vllm.models.dense.llama import LlamaForCausalLM
from vllm.models.registry import resolve_model_class

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


def rope_of(config: HFConfig) -> RopeConfig:
    rotary = LlamaForCausalLM.spec_of(config).layers[0].rotary
    assert rotary is not None
    return rotary.rope


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_defaults_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
        model_class = resolve_model_class([MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[arch]])
        mine = model_class.resolve_config(mine)
        assert mine.tie_word_embeddings == theirs.tie_word_embeddings
        assert mine.num_key_value_heads == getattr(theirs, "num_key_value_heads", 4)
        assert mine.head_dim == (getattr(theirs, "head_dim", None) or 16)
        spec = model_class.spec_of(mine)
        assert spec.layers[0].window == getattr(theirs, "sliding_window", None)
        assert spec.layers[0].qkv_bias == (arch == "qwen2" or getattr(theirs, "attention_bias", arch == "opt"))
        if arch == "opt":
            assert spec.embedding_size == 64 and spec.mlps[0].activation == "relu" and spec.block == "pre"
        else:
            assert spec.mlps[0].activation == theirs.hidden_act and spec.norm.eps == theirs.rms_norm_eps
            assert spec.layers[0].rotary.rope == RopeConfig()


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"some-model/config.json has no {field}"):
        parse(**{field: ...})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "64", "hidden_size must be a positive integer, got '64'"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a positive integer, got 0"),
        ("vocab_size", True, "vocab_size must be a positive integer, got True"),
        ("tie_word_embeddings", 1, "tie_word_embeddings must be true or false, got 1"),
        ("num_key_value_heads", 3, "num_attention_heads must be a multiple of num_key_value_heads=3, got 4"),
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


def test_context_length() -> None:
    assert parse().max_context_len == 128
    assert parse(rope_scaling={"type": "linear", "factor": 4.0}).max_context_len == 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse(rope_scaling=yarn).max_context_len == 512
    assert parse(rope_scaling=yarn, max_position_embeddings=512).max_context_len == 512
    assert parse(rope_scaling={"rope_type": "dynamic", "factor": 4.0}).max_context_len == 128


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
    assert rope_of(load_hf_config(tmp_path, {"rope_theta": 7.0})).theta == 7.0
    scaled = rope_of(load_hf_config(tmp_path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    assert scaled == RopeConfig("linear", 3e4, {"factor": 2.0})
    assert rope_of(load_hf_config(tmp_path, {"rope_scaling": None})) == RopeConfig("default", 3e4)


def test_overrides_of_rotary_options_mean_the_layers_without_a_window(tmp_path: Path) -> None:
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 7.0}}
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL | {"rope_parameters": by_kind}))
    raw = load_hf_config(tmp_path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}).raw
    full = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert raw["rope_parameters"] == by_kind | {"full_attention": full} and "rope_scaling" not in raw
    raw = load_hf_config(tmp_path, {"rope_theta": 9.0}).raw
    assert raw["rope_parameters"]["full_attention"]["rope_theta"] == 9.0


def test_overrides_reach_the_whole_of_a_model_with_pictures(tmp_path: Path) -> None:
    name = "Gemma3ForConditionalGeneration"
    whole = {"architectures": [name], "model_type": "gemma3", "image_token_index": 5, "mm_tokens_per_image": 4}
    parts = {"text_config": {"hidden_size": 32}, "vision_config": {"hidden_size": 24, "hidden_act": "gelu"}}
    (tmp_path / "config.json").write_text(json.dumps(whole | parts))
    asked = {"architectures": [name], "vision_config": {"hidden_act": "relu"}, "image_token_index": 7}
    config = load_hf_config(tmp_path, asked | {"text_config": {"rope_theta": 9.0}})
    assert config.architectures == ("Gemma3ForCausalLM",)
    assert config.hidden_size == 32 and config.raw["rope_theta"] == 9.0
    kept = config.raw[WHOLE]
    assert kept["vision_config"] == {"hidden_size": 24, "hidden_act": "relu"}
    assert kept["image_token_index"] == 7 and "image_token_index" not in config.raw
    with pytest.raises(ValueError, match="vision_config has no option pach_size, got 7"):
        load_hf_config(tmp_path, {"vision_config": {"patch_size": 7, "pach_size": 7}})


def test_overrides_reach_options_that_the_file_leaves_to_the_whole_models_defaults(tmp_path: Path) -> None:
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 5}
    parts = {"text_config": {"model_type": "llama", "hidden_size": 32, "vocab_size": 9}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole | parts))
    asked = {"multimodal_projector_bias": False, "image_token_id": 7, "rms_norm_eps": 0.5, "other": 3}
    config = load_hf_config(tmp_path, asked)
    kept = config.raw[WHOLE]
    assert kept["multimodal_projector_bias"] is False and kept["image_token_index"] == 7
    assert config.raw["rms_norm_eps"] == 0.5 and config.raw["other"] == 3  # which no decoder knows


def test_scaled_positions_of_a_model_with_pictures_have_axes(tmp_path: Path) -> None:
    whole = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vision_config": {}}
    (tmp_path / "config.json").write_text(
        json.dumps(whole | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4})
    )
    rope = {"type": "yarn", "mrope_section": [1, 2, 1], "factor": 4.0, "original_max_position_embeddings": 64}
    for asked in ({"rope_scaling": rope}, {"text_config": {"rope_scaling": rope}}):
        raw = load_hf_config(tmp_path, asked).raw
        found = raw.get("rope_scaling") or raw["rope_parameters"]
        assert found["factor"] == 4.0 and "mrope_section" not in found


def test_a_function_changes_single_options_of_a_tower(tmp_path: Path) -> None:
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    parts = {"text_config": {"hidden_size": 32}, "vision_config": {"hidden_size": 24, "made_by": "someone"}}
    (tmp_path / "config.json").write_text(json.dumps(whole | parts))

    def changed(config: Any) -> Any:
        config.vision_config.patch_size = 7
        return config

    config = load_hf_config(tmp_path, overridden_entries(changed, tmp_path, False))
    assert config.raw[WHOLE]["vision_config"] == parts["vision_config"] | {"patch_size": 7}


def test_reading_a_configuration_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, vllm.config.checkpoint.config, vllm.tokenizers.tokenizer; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_the_heads_dtype_is_float32():
    usual = LlamaForCausalLM.spec_of(parse())
    for value in (None, "float32", "torch.float32"):
        assert LlamaForCausalLM.spec_of(parse(head_dtype=value)) == usual
    for value in ("bfloat16", "model"):
        with pytest.raises(ValueError, match=f"config.json: head_dtype must be float32.* got '{value}'"):
            parse(head_dtype=value)
