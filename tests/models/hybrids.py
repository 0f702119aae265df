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
}
