"""Options that published mixtures have beside those that transformers' configurations know."""

from __future__ import annotations

from typing import Any

import pytest
from mixtures import MIXTURES

from vllm.config.checkpoint.config import parse_hf_config
from vllm.models.registry import resolve_model_class

# By family, what its config.json may say, and what it must not.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        {"router_jitter_noise": 0.0, "router_aux_loss_coef": 0.02, "sliding_window": None},
        {"top_k_groups": 2},
    ),
    "qwen3_moe": ({"max_window_layers": 48, "use_sliding_window": False, "head_dim": 8}, {"shared_experts": 2}),
    "qwen2_moe": ({"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}, {"n_group": 2}),
    "gpt_oss": (
        {"experts_per_token": 4, "initial_context_length": 4096, "hidden_act": "silu"},
        {"router_scale": 2.0},
    ),
    "glm4_moe": ({"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5}, {"scoring_func": "softmax"}),
    "dots1": ({"scoring_func": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1, "seq_aux": True}, {"moe_layer_freq": 2}),
    "minimax_m2": (
        {"attn_type_list": [1] * 4, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_qk_norm": True}
        | {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1, "mlp_intermediate_size": 8192}
        | {"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_routing_bias": True}
        | {"layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "router_jitter_noise": 0.0},
        {"attn_type_list": [1, 0, 1, 0]},
    ),
    "ernie4_5_moe": (
        {"moe_capacity": [64, 64, 64], "moe_use_aux_free": True, "num_nextn_predict_layers": 1, "moe_gate": "topk"},
        {"moe_gate": "sinkhorn"},
    ),
    "hunyuan_v1_moe": (
        {
            "moe_topk": [3] * 4,
            "moe_intermediate_size": [24] * 4,
            "num_shared_expert": [1] * 4,
            "use_mixed_mlp_moe": True,
        }
        | {"attention_head_dim": 8, "cla_share_factor": 2, "use_cla": False, "use_mla": False, "norm_type": "rms"}
        | {"v_head_dim": 128, "qk_nope_head_dim": 128, "norm_topk_prob": True, "use_qk_norm": True},
        {"moe_topk": [3, 2, 3, 2]},
    ),
    "phimoe": ({"input_jitter_noise": 0.01, "lm_head_bias": True}, {"mixer": "soft"}),
    "afmoe": (
        {"score_func": "sigmoid", "route_norm": True, "load_balance_coeff": 0.001, "num_expert_groups": 1}
        | {"num_limited_groups": 1, "use_grouped_mm": True},
        {"score_func": "softmax"},
    ),
    "jetmoe": ({"num_attention_heads": 6, "router_aux_loss_coef": 0.01}, {"num_attention_heads": 4}),
    "longcat_flash": (
        {"attention_method": "MLA", "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "zero_expert_type": "identity"}
        | {"num_hidden_layers": 4, "router_bias": False, "rope_theta": 1e7},
        {"zero_expert_type": "zero"},
    ),
    "deepseek_v32": (
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "ep_size": 1},
        {"layer_types": ["indexed_attention", "full_attention"] * 2},
    ),
    "glm_moe_dsa": ({"index_topk_freq": 4, "index_skip_topk_offset": 2}, {"index_topk": 0}),
    "llama4": ({"attn_temperature_tuning": 4, "for_llm_compressor": False}, {"layer_types": ["other"] * 4}),
}


def check(name: str, options: dict[str, Any]) -> None:
    """Read the family's tiny configuration with these options."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

    model_type, fields = MIXTURES[name]
    sizes = {"vocab_size": 131, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}
    raw = CONFIG_MAPPING[model_type](**sizes, **fields).to_dict() | options
    raw |= {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type}
    config = parse_hf_config(raw, {}, "config.json")
    resolve_model_class(config.architectures).resolve_config(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_options_are_read_and_others_refused(name: str) -> None:
    published, wrong = PUBLISHED[name]
    check(name, published)
    with pytest.raises(ValueError, match="|".join(wrong)):
        check(name, published | wrong)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "a token cannot have 7 of 6 experts"),
        ("glm4_moe", {"n_group": 3}, "cannot be of 2 of 3 groups of 8"),
        ("glm4_moe", {"topk_group": 1}, "a token's 3 experts cannot be of 1 of 4 groups of 8"),
        ("exaone_moe", {"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types must name dense or sparse for each of 4"),
    ],
)
def test_what_does_not_fit_is_named(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check(name, options)
