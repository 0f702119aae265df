"""Every native architecture with recurrent states that transformers has, too: the fields of a random model."""

from __future__ import annotations

from typing import Any

WINDOW = 9
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_CONVS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
# With four of them float32 itself, transformers' too, is off by more than what tests allow.
_THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
_LATENT = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 24,
}
_KINDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 10, "mamba_n_groups": 2}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 1.5}
_MAMBA = {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 6}
# Its cache takes widths that are multiples of 64.
_XLSTM = {
    "use_cache": False,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 4,
    "ffn_round_up_to_multiple_of": 16,
}
_ZAMBA = _SIZES | {
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"],
}
_SHARED = {"shared_expert_intermediate_size": 24}

# By a name of its own: transformers' model type and what differs from its usual fields.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", _SIZES | _CONVS | {"block_multiple_of": 16}),
    "lfm2-bias": (
        "lfm2",
        _SIZES | {"conv_bias": True, "conv_L_cache": 4, "full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": ("lfm2_moe", _SIZES | _EXPERTS | _CONVS | {"num_dense_layers": 1, "routed_scaling_factor": 1.7}),
    "lfm3": (
        "lfm3",
        _SIZES
        | {"head_dim": 8, "sliding_window": WINDOW, "rope_parameters": None}
        | {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
    ),
    "lfm3-plain": (
        "lfm3",
        _SIZES | _CONVS | {"head_dim": 8, "use_sandwich_norm": False, "use_attention_gate": False},
    ),
    "qwen3_next": ("qwen3_next", _SIZES | _LINEAR | _EXPERTS | _SHARED | {"mlp_only_layers": [2]}),
    "qwen3_5": ("qwen3_5_text", _SIZES | _LINEAR | {"linear_conv_kernel_dim": 3}),
    "qwen3_5_moe": ("qwen3_5_moe_text", _SIZES | _LINEAR | _EXPERTS | _SHARED | _THREE_LAYERS),
    "granite_hybrid": (
        "granitemoehybrid",
        _SIZES | _KINDS | _MAMBA2 | _GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 24},
    ),
    "granite_hybrid-dense": (
        "granitemoehybrid",
        _SIZES
        | _KINDS
        | {"mamba_n_heads": 4, "mamba_d_state": 12, "mamba_d_conv": 3, "mamba_conv_bias": False}
        | {"mamba_proj_bias": True, "num_local_experts": 0, "shared_intermediate_size": 40}
        | {"time_step_limit": (0.2, 1.5), "position_embedding_type": "rope"},
    ),
    "bamba": ("bamba", _SIZES | _MAMBA2 | {"attn_layer_indices": [1], "mamba_proj_bias": True}),
    "nemotron_h": (
        "nemotron_h",
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]}
        | {"mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 10, "mlp_bias": True},
    ),
    "nemotron_h-mixture": (
        "nemotron_h",
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]}
        | {"mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 10, "n_routed_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40}
        | {"routed_scaling_factor": 1.7},
    ),
    "mamba2": (
        "mamba2",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2}
        | {"use_bias": True, "tie_word_embeddings": True},
    ),
    "mamba": ("mamba", _MAMBA | {"use_bias": True}),
    "falcon_mamba": ("falcon_mamba", _MAMBA | {"time_step_rank": 5, "conv_kernel": 3, "use_conv_bias": False}),
    "jamba": (
        "jamba",
        _SIZES
        | {
            "num_experts": 4,
            "mamba_d_state": 6,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_proj_bias": True,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        _SIZES
        | {"head_dim": 8, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_state": 10, "mamba_n_groups": 2}
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True, "projectors_bias": True}
        | {"key_multiplier": 0.6, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7}
        | {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]}
        | {"mlp_multipliers": [0.8, 1.2], "embedding_multiplier": 2.0, "lm_head_multiplier": 0.6},
    ),
    "falcon_h1-plain": ("falcon_h1", _SIZES | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 6}),
    "olmo_hybrid": (
        "olmo_hybrid",
        # transformers splits a convolution into equal parts as it saves it.
        _SIZES | _LINEAR | {"linear_num_key_heads": 4, "linear_value_head_dim": 12, "rope_parameters": None},
    ),
    "olmo_hybrid-rope": (
        "olmo_hybrid",
        _SIZES
        | _THREE_LAYERS
        | {"linear_value_head_dim": 6, "linear_allow_neg_eigval": False, "rope_parameters": _ROPE},
    ),
    "kimi_linear": (
        "kimi_linear",
        _SIZES | _THREE_LAYERS | _LATENT | {"linear_head_dim": 12, "linear_num_heads": 4, "num_experts": 6},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        _SIZES | _THREE_LAYERS | _LATENT | {"head_dim": 12, "num_experts": 6, "n_group": 3, "topk_group": 2},
    ),
    "bailing_hybrid-free": (
        "bailing_hybrid",
        _SIZES
        | _LATENT
        | {"head_dim": 12, "num_experts": 4, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2}
        | {"kda_safe_gate": False, "layer_group_size": 2, "q_lora_rank": 14},
    ),
    "minimax": (
        "minimax",
        _SIZES
        | _THREE_LAYERS
        | {"num_local_experts": 4, "block_size": 16, "mlp_alpha_factor": 1.7}
        | {"linear_attn_alpha_factor": 1.5, "full_attn_alpha_factor": 0.8},
    ),
    "rwkv": (
        "rwkv",
        {
            "use_cache": False,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "attention_hidden_size": 48,
            "intermediate_size": 56,
        },
    ),
    "xlstm": ("xlstm", _XLSTM | {"gate_soft_cap": 4.0, "v_dim_factor": 1.5, "output_logit_soft_cap": 5.0}),
    "zamba": (
        "zamba",
        _ZAMBA | {"n_mamba_heads": 2, "mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_proj_bias": True},
    ),
    "zamba2": (
        "zamba2",
        _ZAMBA
        | {"num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 10, "adapter_rank": 6}
        | {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True, "add_bias_linear": True},
    ),
    "zamba2-plain": ("zamba2", _ZAMBA | {"n_mamba_heads": 8, "mamba_d_state": 10, "adapter_rank": 6}),
    "recurrent_gemma": (
        "recurrent_gemma",
        _SIZES | {"lru_width": 48, "attention_window_size": WINDOW, "logits_soft_cap": 3.0},
    ),
}
