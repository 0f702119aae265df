"""Every native mixture that transformers has, too: the fields of a random model of four layers."""

from __future__ import annotations

from typing import Any

WINDOW = 9
_USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_MHA = {name: value for name, value in _USUAL.items() if name != "head_dim"}
_OWN_MLP = {name: value for name, value in _USUAL.items() if name != "intermediate_size"}
_WINDOWS = {"sliding_window": WINDOW}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_OWN_SIZE = {"num_experts": 6, "num_experts_per_tok": 3}
_EXPERTS = _OWN_SIZE | {"moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3}
_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2}
_ROUTED |= {"routed_scaling_factor": 1.7, "norm_topk_prob": True}
_LATENT = _MHA | {"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 24, "v_head_dim": 12}
_LATENT |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "n_shared_experts": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_MSCALE = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}

# By a name of its own: transformers' model type and what differs from its usual fields.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": (
        "qwen2_moe",
        _USUAL | _EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen2_moe-windows": (
        "qwen2_moe",
        _USUAL
        | _EXPERTS
        | _WINDOWS
        | {"shared_expert_intermediate_size": 40, "use_sliding_window": True, "max_window_layers": 3}
        | {"decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", _USUAL | _EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe-all": ("qwen3_moe", _USUAL | _EXPERTS | {"num_experts_per_tok": 6}),
    "mixtral": ("mixtral", _USUAL | _LOCAL | _WINDOWS),
    "olmoe": ("olmoe", _MHA | _OWN_SIZE | {"clip_qkv": 0.5}),
    "flex_olmo": ("flex_olmo", _MHA | _OWN_SIZE | {"norm_topk_prob": True}),
    "granitemoe": (
        "granitemoe",
        _MHA
        | _LOCAL
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    ),
    "granitemoeshared": ("granitemoeshared", _MHA | _LOCAL | {"shared_intermediate_size": 40}),
    "granitemoe_swa": (
        "granitemoe_swa",
        _MHA
        | _LOCAL
        | _WINDOWS
        | {"attention_multiplier": 0.2, "layer_rope_theta": [0, 100.0, 1e4, 1e4], "shared_intermediate_size": 40},
    ),
    "dots1": (
        "dots1",
        _USUAL | _ROUTED | _WINDOWS | {"first_k_dense_replace": 1, "n_shared_experts": 2, "max_window_layers": 2},
    ),
    "glm4_moe": ("glm4_moe", _USUAL | _ROUTED | {"use_qk_norm": True, "attention_bias": True}),
    "exaone_moe": ("exaone_moe", _USUAL | _ROUTED | _WINDOWS | {"num_experts": 8, "num_shared_experts": 1}),
    "solar_open": ("solar_open", _USUAL | _ROUTED | {"n_shared_experts": 1}),
    "minimax_m2": ("minimax_m2", _USUAL | _LOCAL | {"rotary_dim": 4}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        _USUAL
        | {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_layer_end_index": 2, "use_bias": True},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", _USUAL | {"num_experts": 6, "moe_topk": 3}),
    "gpt_oss": (
        "gpt_oss",
        _USUAL
        | _LOCAL
        | _WINDOWS
        | {"swiglu_limit": 1.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "flint": (
        "flint",
        _USUAL | _EXPERTS | _WINDOWS | _KINDS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "mellum": ("mellum", _USUAL | _EXPERTS | _WINDOWS | _KINDS | {"mlp_layer_types": ["dense"] + ["sparse"] * 3}),
    "hy_v3": ("hy_v3", _USUAL | _EXPERTS | {"num_shared_experts": 2}),
    "kolibri1": (
        "kolibri1",
        _OWN_MLP | _EXPERTS | _WINDOWS | _KINDS | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "laguna": (
        "laguna",
        _USUAL
        | _EXPERTS
        | _WINDOWS
        | _KINDS
        | {"num_attention_heads_per_layer": [4, 2, 6, 4], "moe_router_logit_softcapping": 3.0}
        | {"shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.5, "rope_parameters": _ROPES},
    ),
    "laguna-channels": (
        "laguna",
        _USUAL | _EXPERTS | {"gating": "per-channel", "shared_expert_intermediate_size": 40, "rope_parameters": _ROPES},
    ),
    "afmoe": ("afmoe", _USUAL | _EXPERTS | _WINDOWS | _KINDS | {"mup_enabled": True, "route_scale": 1.5}),
    "aria_text": ("aria_text", _USUAL | {"moe_num_experts": 6, "moe_topk": 3, "mlp_bias": True}),
    "cohere2_moe": (
        "cohere2_moe",
        _USUAL
        | _OWN_SIZE
        | _WINDOWS
        | {"num_shared_experts": 2, "logit_scale": 0.7, "first_k_dense_replace": 1}
        | {"prefix_dense_intermediate_size": 40},
    ),
    "cohere2_moe-sigmoid": (
        "cohere2_moe",
        _USUAL | _OWN_SIZE | _WINDOWS | {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-6, "logit_scale": 0.7},
    ),
    "llama4": (
        "llama4_text",
        _USUAL
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 40, "attention_chunk_size": 16}
        | {"no_rope_layer_interval": 2, "interleave_moe_layer_step": 2, "floor_scale": 8, "attn_scale": 0.3},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        _LATENT | _ROUTED | {"first_k_dense_replace": 1, "index_topk": 128, "index_head_dim": 8, "index_n_heads": 2},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        _LATENT
        | _ROUTED
        | {"first_k_dense_replace": 1, "index_topk": 128, "index_head_dim": 8, "index_n_heads": 2}
        | {"indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "jetmoe": (
        "jetmoe",
        {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_key_value_heads": 2}
        | {
            "num_attention_heads": 6,
            "kv_channels": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rms_norm_eps": 1e-3,
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        {name: value for name, value in _LATENT.items() if name not in ("num_hidden_layers", "n_shared_experts")}
        | {"num_layers": 2, "head_dim": 6, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "moe_topk": 3}
        | {"n_routed_experts": 6, "zero_expert_num": 3, "routed_scaling_factor": 1.7},
    ),
    "dbrx": (
        "dbrx",
        {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 128}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 3}},
    ),
    "phimoe": ("phimoe", _MHA | {"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.2}),
    "deepseek_v2": (
        "deepseek_v2",
        _LATENT
        | _ROUTED
        | {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "rope_parameters": _MSCALE}
        | {"first_k_dense_replace": 1},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        _LATENT
        | _ROUTED
        | {"q_lora_rank": None, "norm_topk_prob": False, "n_group": None, "topk_group": None, "n_shared_experts": 2},
    ),
    "deepseek_v3": ("deepseek_v3", _LATENT | _ROUTED | {"rope_parameters": _MSCALE, "first_k_dense_replace": 1}),
    "deepseek_v3-dense": ("deepseek_v3", _LATENT | _ROUTED | {"first_k_dense_replace": 4, "rope_interleave": False}),
    "kimi_k2": (
        "deepseek_v3",
        _LATENT | _ROUTED | {"n_group": 1, "topk_group": 1, "attention_bias": True},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT | _ROUTED),
    "mistral4": (
        "mistral4",
        _LATENT
        | _ROUTED
        | {
            "rope_parameters": _YARN
            | {"llama_4_scaling_beta": 0.1, "mscale_all_dim": 1.0, "partial_rotary_factor": 6 / 16}
        },
    ),
    "axk1": (
        "axk1",
        _LATENT | _ROUTED | {"rope_parameters": _MSCALE, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "gemma4-experts": (
        "gemma4_text",
        _USUAL
        | _WINDOWS
        | _KINDS
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
        | {"global_head_dim": 16, "hidden_size_per_layer_input": 0},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        _USUAL | _ROUTED | _WINDOWS | _KINDS | {"v_head_dim": 6, "num_key_value_heads": 1, "rope_parameters": _ROPES},
    ),
}
