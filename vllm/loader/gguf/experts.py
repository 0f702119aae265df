"""config.json of GGUF's mixtures of experts, from the header."""

from __future__ import annotations

from vllm.loader.gguf.config_parts import (
    FULL,
    SLIDING,
    Config,
    granite,
    is_biased,
    layer_types,
    modern,
    partial_rope,
    rope_parameters,
    with_head_dim,
)
from vllm.loader.gguf.header import GGUFHeader


def _experts(h: GGUFHeader, name: str) -> Config:
    return {name: h.need("expert_count"), "num_experts_per_tok": h.need("expert_used_count")}


def _groups(h: GGUFHeader) -> Config:
    return {"n_group": h.get("expert_group_count") or 1, "topk_group": h.get("expert_group_used_count") or 1}


def mixtral(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **_experts(h, "num_local_experts"),
        "sliding_window": h.get("attention.sliding_window"),
    }


def qwen2_moe(h: GGUFHeader) -> Config:
    return _qwen(modern(h), h, norm_topk_prob=False) | {
        "shared_expert_intermediate_size": h.rows("blk.0.ffn_up_shexp.weight"),
        "qkv_bias": is_biased(h),
    }


def qwen3_moe(h: GGUFHeader) -> Config:
    return _qwen(with_head_dim(h), h, norm_topk_prob=True)


def _qwen(config: Config, h: GGUFHeader, norm_topk_prob: bool) -> Config:
    return config | {
        **_experts(h, "num_experts"),
        "moe_intermediate_size": _width(h),
        "norm_topk_prob": norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def olmoe(h: GGUFHeader) -> Config:
    return modern(h) | {
        "intermediate_size": _width(h),
        **_experts(h, "num_experts"),
        "norm_topk_prob": False,
        "clip_qkv": h.get("attention.clamp_kqv"),
    }


def _width(h: GGUFHeader) -> int:
    """Outputs of an expert's first matrices."""
    shape = h.file.tensors["blk.0.ffn_up_exps.weight"].shape if h.has("blk.0.ffn_up_exps.weight") else ()
    if len(shape) != 3:
        raise h.error(f"tensor blk.0.ffn_up_exps.weight must stack matrices, got {shape or None}")
    return shape[1]


def routed(h: GGUFHeader) -> Config:
    """What DeepSeek and models of its kind say of their experts."""
    return {
        **_experts(h, "n_routed_experts"),
        "n_shared_experts": h.get("expert_shared_count", 0),
        "moe_intermediate_size": h.need("expert_feed_forward_length"),
        "first_k_dense_replace": h.get("leading_dense_block_count", 0),
        "routed_scaling_factor": h.get("expert_weights_scale", 1.0),
        "norm_topk_prob": h.get("expert_weights_norm", False),
    }


def glm4_moe(h: GGUFHeader) -> Config:
    if h.get("rope.dimension_sections"):
        raise h.wrong("rope.dimension_sections", "is not supported")
    return (
        modern(h)
        | routed(h)
        | {
            "head_dim": h.head_dim,
            "rope_parameters": partial_rope(h),
            "attention_bias": is_biased(h),
            "use_qk_norm": h.has("blk.0.attn_q_norm.weight"),
            **_groups(h),
        }
    )


def dots1(h: GGUFHeader) -> Config:
    kinds = {"sliding_window": None, "layer_types": [FULL] * h.layers}
    return with_head_dim(h) | routed(h) | kinds | {"attention_bias": is_biased(h), "n_group": 1, "topk_group": 1}


def ernie4_5_moe(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {
        "moe_num_experts": h.need("expert_count"),
        "moe_k": h.need("expert_used_count"),
        "moe_intermediate_size": h.need("expert_feed_forward_length"),
        "moe_num_shared_experts": h.get("expert_shared_count", 0),
        "moe_layer_start_index": h.get("leading_dense_block_count", 0),
        "moe_layer_interval": h.get("interleave_moe_layer_step", 1),
        "use_bias": is_biased(h),
    }


def hunyuan_moe(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {
        "num_experts": h.need("expert_count"),
        "moe_topk": h.need("expert_used_count"),
        "intermediate_size": _width(h),
        "attention_bias": is_biased(h),
    }


def minimax_m2(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {
        **_experts(h, "num_local_experts"),
        "intermediate_size": _width(h),
        "rope_parameters": partial_rope(h),
    }


def granite_moe(h: GGUFHeader) -> Config:
    config = granite(h) | {
        **_experts(h, "num_local_experts"),
        "attention_bias": is_biased(h),
    }
    if not h.has("blk.0.ffn_up_shexp.weight"):
        return config
    return config | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": h.rows("blk.0.ffn_up_shexp.weight"),
    }


def afmoe(h: GGUFHeader) -> Config:
    _needs_normalised(h)
    return with_head_dim(h) | {
        "num_dense_layers": h.get("leading_dense_block_count", 0),
        **_experts(h, "num_experts"),
        "num_shared_experts": h.get("expert_shared_count", 0),
        "moe_intermediate_size": h.need("expert_feed_forward_length"),
        "route_scale": h.get("expert_weights_scale", 1.0),
        "sliding_window": h.need("attention.sliding_window"),
        "layer_types": layer_types(h, 4),
        "mup_enabled": True,
    }


def exaone_moe(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {
        "first_k_dense_replace": h.get("leading_dense_block_count", 0),
        **_experts(h, "num_experts"),
        "num_shared_experts": h.get("expert_shared_count", 0),
        "moe_intermediate_size": h.need("expert_feed_forward_length"),
        "routed_scaling_factor": h.get("expert_weights_scale", 1.0),
        "norm_topk_prob": h.get("expert_weights_norm", False),
        **_groups(h),
        "sliding_window": h.need("attention.sliding_window"),
        "layer_types": layer_types(h, 4),
    }


def phimoe(h: GGUFHeader) -> Config:
    config = modern(h)
    rope = config["rope_parameters"]
    if "long_factor" in rope:
        # The model scales by these, not by what follows from its context.
        rope["short_mscale"] = rope["long_mscale"] = rope.pop("attention_factor", 1.0)
    return config | {
        **_experts(h, "num_local_experts"),
        "intermediate_size": _width(h),
        "attention_bias": is_biased(h),
        "lm_head_bias": h.has("output.bias"),
    }


def bailing_moe(h: GGUFHeader) -> Config:
    _needs_normalised(h)
    return ernie4_5_moe(h)


def _needs_normalised(h: GGUFHeader) -> None:
    if not h.get("expert_weights_norm", False):
        raise h.wrong("expert_weights_norm", "must be true: other weights of experts are not supported")


def mimo2(h: GGUFHeader) -> Config:
    """MiMo V2 Flash. Layers with a window have twice the heads of keys and values of those without."""
    kinds = layer_types(h, 6)
    heads = h.by_layer("attention.head_count_kv")
    full = next((each for each, kind in zip(heads, kinds, strict=True) if kind == FULL), heads[0] // 2)
    if heads != [full if kind == FULL else 2 * full for kind in kinds]:
        raise h.wrong("attention.head_count_kv", f"must be twice as many in layers with a window, got {heads}")
    rotated = h.get("rope.dimension_count", h.head_dim) / h.head_dim
    thetas = {FULL: h.get("rope.freq_base", 10000.0), SLIDING: h.get("rope.freq_base_swa", 10000.0)}
    sparse = [h.has(f"blk.{index}.ffn_gate_inp.weight") for index in range(h.layers)]
    return {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "num_key_value_heads": full,
        "intermediate_size": h.uniform("feed_forward_length"),
        "max_position_embeddings": h.need("context_length"),
        "rms_norm_eps": h.get("attention.layer_norm_rms_epsilon", 1e-5),
        "head_dim": h.head_dim,
        "v_head_dim": h.need("attention.value_length"),
        **_experts(h, "n_routed_experts"),
        "moe_intermediate_size": h.need("expert_feed_forward_length"),
        "routed_scaling_factor": h.get("expert_weights_scale") or 1.0,
        **_groups(h),
        "sliding_window": h.need("attention.sliding_window"),
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "attention_value_scale": h.get("attention.value_scale") or 1.0,
        "attention_bias": is_biased(h),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotated}
            for kind, theta in thetas.items()
        },
    }


def gpt_oss(h: GGUFHeader) -> Config:
    # The published models' frequencies are not rounded to whole ones where the scaling begins and ends.
    rope = rope_parameters(h)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return with_head_dim(h) | {
        **_experts(h, "num_local_experts"),
        "intermediate_size": _width(h),
        "sliding_window": h.need("attention.sliding_window"),
        "layer_types": layer_types(h, 2),
        "attention_bias": is_biased(h),
        "rope_parameters": rope,
    }
