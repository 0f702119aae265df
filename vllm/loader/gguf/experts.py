"""config.json of GGUF's mixtures of experts of which a row's entries do not say all, from the header."""

from __future__ import annotations

from collections.abc import Callable

from vllm.loader.gguf.config_parts import (
    FULL,
    SLIDING,
    Config,
    entries,
    layer_types,
    partial_rope,
    pick,
    rope_parameters,
)
from vllm.loader.gguf.header import GGUFHeader

ROUTED = (
    "n_routed_experts num_experts_per_tok n_shared_experts moe_intermediate_size first_k_dense_replace "
    "routed_scaling_factor norm_topk_prob"
)
"""Entries of DeepSeek, and models of its kind, for their experts."""


def width(h: GGUFHeader) -> int:
    """Outputs of an expert's first matrices."""
    shape = h.file.tensors["blk.0.ffn_up_exps.weight"].shape if h.has("blk.0.ffn_up_exps.weight") else ()
    if len(shape) != 3:
        raise h.error(f"tensor blk.0.ffn_up_exps.weight must stack matrices, got {shape or None}")
    return shape[1]


def normalised(config: Callable[[GGUFHeader], Config]) -> Callable[[GGUFHeader], Config]:
    """`config` of models that know no other weights of experts than those whose sum is 1."""

    def checked(h: GGUFHeader) -> Config:
        if not h.get("expert_weights_norm", False):
            raise h.wrong("expert_weights_norm", "must be true: other weights of experts are not supported")
        return config(h)

    return checked


mixtral = entries(
    "head_dim num_local_experts num_experts_per_tok",
    architectures=["MixtralForCausalLM"],
    model_type="mixtral",
    sliding_window=lambda h: h.get("attention.sliding_window"),
)
ernie4_5 = entries(
    "head_dim moe_num_experts moe_k moe_intermediate_size moe_num_shared_experts moe_layer_start_index "
    "moe_layer_interval use_bias"
)


def glm4(h: GGUFHeader) -> Config:
    if h.get("rope.dimension_sections"):
        raise h.wrong("rope.dimension_sections", "is not supported")
    names = f"head_dim {ROUTED} attention_bias use_qk_norm n_group topk_group"
    return entries(names, rope_parameters=partial_rope)(h)


def granite(h: GGUFHeader) -> Config:
    config = pick(h, "num_local_experts num_experts_per_tok attention_bias")
    if not h.has("blk.0.ffn_up_shexp.weight"):
        return config
    return config | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": h.rows("blk.0.ffn_up_shexp.weight"),
    }


def phi(h: GGUFHeader) -> Config:
    names = "num_local_experts num_experts_per_tok attention_bias lm_head_bias"
    config = entries(names, intermediate_size=width)(h)
    rope = config["rope_parameters"]
    if "long_factor" in rope:
        # The model scales by these, not by what follows from its context.
        rope["short_mscale"] = rope["long_mscale"] = rope.pop("attention_factor", 1.0)
    return config


def mimo2(h: GGUFHeader) -> Config:
    """MiMo V2 Flash. Layers with a window have twice the heads of keys and values of those without."""
    kinds = layer_types(h, 6)
    heads = h.by_layer("attention.head_count_kv")
    full = next((count for count, kind in zip(heads, kinds, strict=True) if kind == FULL), heads[0] // 2)
    if heads != [full if kind == FULL else 2 * full for kind in kinds]:
        raise h.wrong("attention.head_count_kv", f"must be twice as many in layers with a window, got {heads}")
    rotated = h.get("rope.dimension_count", h.head_dim) / h.head_dim
    thetas = {FULL: h.get("rope.freq_base", 10000.0), SLIDING: h.get("rope.freq_base_swa", 10000.0)}
    sparse = [h.has(f"blk.{index}.ffn_gate_inp.weight") for index in range(h.layers)]
    names = "head_dim n_routed_experts num_experts_per_tok moe_intermediate_size n_group topk_group"
    return pick(h, f"{names} sliding_window attention_bias") | {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "num_key_value_heads": full,
        "intermediate_size": h.uniform("feed_forward_length"),
        "max_position_embeddings": h.need("context_length"),
        "rms_norm_eps": h.get("attention.layer_norm_rms_epsilon", 1e-5),
        "v_head_dim": h.need("attention.value_length"),
        "routed_scaling_factor": h.get("expert_weights_scale") or 1.0,
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
        "attention_value_scale": h.get("attention.value_scale") or 1.0,
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
    return {"layer_types": layer_types(h, 2), "rope_parameters": rope}
