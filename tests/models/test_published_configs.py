"""Options that published models have beside those that transformers' configurations know; mixtures' are in
test_mixture_configs.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, make_architecture
from models_util import hf_logits, load_model, paged_logits, random_prompts
from safetensors.torch import load_file, save_file

from vllm.config.checkpoint.config import HFConfig, parse_hf_config
from vllm.models.registry import import_model_class, model_entry, resolve_model_class

_STEPS = {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4}

# By family, what its config.json may say, and what it must not.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"transformers.js_config": {"dtype": "q4f16", "use_external_data_format": {"model.onnx": 2}}}
        | {"is_llama_config": True, "rope_interleaved": False, "pad_token": "[PAD]", "trust_remote_code": True}
        | {"neftune_noise_alpha": 5, "max_sequence_length": 2048, "unsloth_fixed": True},
        {"rope_interleaved": True},
    ),
    "gemma2": (
        {"sliding_window": 9, "sliding_window_size": 9, "cache_implementation": "hybrid", "attention_bias": False},
        {"sliding_window_size": 8},
    ),
    "gemma3n": ({"query_pre_attn_scalar": 256, "altup_coef_clip": 120.0}, {"logits_scale": 2.0}),
    "gpt_bigcode": (
        {"pad_key_length": True, "validate_runner_input": True, "pre_allocate_kv_cache": False, "inference_runner": 0}
        | {"max_batch_size": None, "max_sequence_length": None, "scale_attention_softmax_in_fp32": True},
        {"runner": 2},
    ),
    "starcoder2": (
        {"activation_function": "gelu", "mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}
        | {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True},
        {"scale_attn_weights": False},
    ),
    "cohere2": (
        {"layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0}
        | {"position_embedding_type": "rope_gptj", "use_parallel_block": True, "use_gated_activation": True},
        {"layer_switch": 3},
    ),
    "hunyuan_v1_dense": (
        {"dense_list": [32, 0], "class_num": 0, "enable_lm_head_fp32": True, "use_rotary_pos_emb": True}
        | {"add_classification_head": False, "cla_share_factor": 2, "use_cla": False, "pool_type": "last"}
        | {"im_start_id": 4, "eod_token_id": 3, "mask_init_id": 12, "org_vocab_size": 100, "num_experts": 1},
        {"use_rotary_pos_emb": False},
    ),
    "falcon": ({"ff_factor": 4, "activation": "gelu", "ffn_hidden_size": 128}, {"bias_factor": 4}),
    "lfm2": (
        {"use_pos_enc": True, "block_dim": 32, "block_use_swiglu": True, "conv_dim": 32, "num_heads": 4},
        {"use_pos_enc": False},
    ),
    "qwen3_5": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
            | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
            "mamba_ssm_dtype": "float32",
            "attn_output_gate": True,
            "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1,
        },
        {"attn_output_gate": False},
    ),
    "granite_hybrid": (
        {"normalization_function": "rmsnorm", "init_method": "mup", "position_embedding_type": "nope"},
        {"normalization_function": "layernorm"},
    ),
    "bamba": ({"attn_rotary_emb": 4}, {"attn_rotary_emb": 8}),
    "nemotron_h": (
        {
            "attention_head_dim": 8,
            "rope_theta": 10000,
            "partial_rotary_factor": 1.0,
            "num_query_groups": 2,
            "time_step_rank": 16,
            "rescale_prenorm_residual": True,
        },
        {"attention_bias": True},
    ),
    "mamba2": (
        {"norm_before_gate": True, "rms_norm": True, "time_step_init_scheme": "random", **_STEPS}
        | {"intermediate_size": 64},
        {"rms_norm": False},
    ),
    "mamba": (
        {"fused_add_norm": True, "rms_norm": True, "pad_vocab_size_multiple": 8, "ssm_cfg": {}, "d_model": 32},
        {"rms_norm": False},
    ),
    "falcon_h1": (
        {"mlp_expansion_factor": 8, "time_step_rank": "auto", "attn_layer_indices": None} | _STEPS,
        {"residual_multiplier": 2.0},
    ),
    "jamba": ({"mamba_inner_layernorms": True, "use_mamba_kernels": True}, {"mamba_inner_layernorms": False}),
    "zamba2": (
        {"use_shared_mlp_adapter": True, "use_long_context": False, "kv_channels": 8},
        {"use_shared_mlp_adapter": False},
    ),
    "recurrent_gemma": ({"embeddings_scale_by_sqrt_dim": True}, {"embeddings_scale_by_sqrt_dim": False}),
    "xlstm": (
        {"add_post_blocks_norm": True, "add_post_norm": False, "add_qk_norm": False, "cell_norm_eps": 1e-6}
        | {"force_bos_token_insert": True, "head_dim": 12, "igate_bias_init_range": -10.0}
        | {"mlstm_round_up_to_multiple_of": 64, "embedding_dim": 32, "num_blocks": 3},
        {"cell_norm_eps": 1e-3},
    ),
}


def read(name: str, options: dict[str, Any]) -> HFConfig:
    """The family's tiny configuration with these options; ... leaves one out."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    model_type, fields = ARCHITECTURES[name]
    sizes: dict[str, Any] = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2}
    raw = CONFIG_MAPPING[model_type](**sizes, **fields).to_dict() | options
    raw |= {"architectures": [NAMES[model_type]], "model_type": model_type}
    config = parse_hf_config({key: value for key, value in raw.items() if value is not ...}, {}, "config.json")
    model_class: Any = resolve_model_class(config.architectures)
    return model_class.resolve_config(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_options_are_read_and_others_refused(name: str) -> None:
    published, wrong = PUBLISHED[name]
    read(name, published)
    with pytest.raises(ValueError, match="|".join(wrong)):
        read(name, published | wrong)


def test_options_of_multilingual_bert() -> None:
    from transformers import BertConfig

    raw = BertConfig(vocab_size=99).to_dict() | {"architectures": ["BertModel"], "directionality": "bidi"}
    raw |= {"pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3}
    raw |= {"pooler_size_per_head": 128, "pooler_type": "first_token_transform"}
    model_class: Any = import_model_class(model_entry(raw["architectures"]))
    assert model_class.resolve_config(parse_hf_config(raw, {})).is_encoder
    with pytest.raises(ValueError, match="pooler_type='mean' is not supported"):
        model_class.resolve_config(parse_hf_config(raw | {"pooler_type": "mean"}, {}))


def test_sizes_under_the_names_of_xlstm() -> None:
    config = read("xlstm", {"hidden_size": ..., "num_hidden_layers": ..., "embedding_dim": 32, "num_blocks": 3})
    assert (config.hidden_size, config.num_hidden_layers) == (32, 3)


def test_a_text_has_one_position_in_all_sections(tmp_path: Path) -> None:
    """Qwen3.5's rotary sections are those of images."""
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
    sections = {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    model = make_architecture("qwen3_5", tmp_path, rope_parameters=rope | sections)
    ours, config = load_model(tmp_path)
    prompts = random_prompts(131, (5, 21))
    for got, want in zip(paged_logits(ours, config, prompts), hf_logits(model, prompts), strict=True):
        assert (got - want).abs().max() < 1e-4 * want.std()


def test_a_further_factor_of_yarn(tmp_path: Path) -> None:
    """Upstream's, on top of that by the formula."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    make_architecture("qwen3", tmp_path, rope_parameters=yarn | {"attention_factor": 0.9})
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    logits = []
    for factor in ({"attention_factor": 0.9}, {"attn_factor": 0.9 / (0.1 * math.log(4.0) + 1.0)}):
        path.write_text(json.dumps(raw | {"rope_parameters": yarn | factor}))
        logits.append(paged_logits(*load_model(tmp_path), random_prompts(131, (5, 21)))[1])
    assert (logits[1] - logits[0]).abs().max() < 1e-5


def test_mimo_is_qwen_beside_further_layers(tmp_path: Path) -> None:
    model = make_architecture("qwen2", tmp_path, use_sliding_window=False)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.mtp_layers.0.final_layernorm.weight": tensors["model.norm.weight"].clone()}, path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    ours, config = load_model(tmp_path)
    prompts = random_prompts(131, (5, 21))
    for got, want in zip(paged_logits(ours, config, prompts), hf_logits(model, prompts), strict=True):
        assert (got - want).abs().max() < 1e-4 * want.std()


@pytest.mark.parametrize(
    ("name", "fields"), [("mimo_v2_flash", {"attention_value_scale": 0.4242}), ("gemma4-experts", {})]
)
def test_factors_on_weights_are_not_rounded_as_the_file_is(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    model = make_architecture(name, tmp_path, **fields)
    for tensor in model.state_dict().values():
        tensor.copy_(tensor.bfloat16())
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({key: tensor.bfloat16() for key, tensor in load_file(path).items()}, path)
    ours, config = load_model(tmp_path)
    prompts = random_prompts(131, (5, 21))
    for got, want in zip(paged_logits(ours, config, prompts), hf_logits(model, prompts), strict=True):
        assert (got - want).abs().max() < 1e-4 * want.std()
