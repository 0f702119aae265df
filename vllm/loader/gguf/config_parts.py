"""The common parts of the configurations of GGUF's architectures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vllm.loader.gguf.header import GGUFHeader

Config = dict[str, Any]
ROPE_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_long.weight"
# Stands for null in config.json, in place of a default.
NULL = object()
SLIDING, FULL = "sliding_attention", "full_attention"


_SCALINGS = "none", "linear", "yarn", "longrope"


def rope_parameters(h: GGUFHeader, theta: float = 10000.0) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": h.get("rope.freq_base", theta)}
    # A factor without a type is linear.
    kind, factor = h.get("rope.scaling.type", "linear"), _scale(h)
    if kind not in _SCALINGS:
        raise h.wrong("rope.scaling.type", f"must be one of {', '.join(_SCALINGS)}, got {kind!r}")
    if kind == "none":
        factor = 1.0
    if (tensor := next(filter(h.has, (ROPE_FACTORS, LONG_FACTORS)), None)) is not None:
        if kind == "yarn" and factor != 1.0:
            raise h.wrong("rope.scaling.type", f"yarn beside the tensor {tensor} is not supported")
        return rope | (_long(h, factor) if tensor == LONG_FACTORS else _factors(h, factor))
    if kind == "longrope":
        raise ValueError(f"{h.file.path.name} has rope.scaling.type=longrope, but no tensor {LONG_FACTORS}")
    if kind == "yarn":
        rope |= {"rope_type": kind, "factor": h.need("rope.scaling.factor")} | _yarn(h)
        if (original := h.get("rope.scaling.original_context_length")) is not None:
            rope["original_max_position_embeddings"] = original
    elif factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    return rope


def _scale(h: GGUFHeader) -> float:
    """The divisor of positions; 0 stands for 1."""
    older, key = h.get("rope.scale_linear"), "rope.scaling.factor"
    if (value := h.get(key)) is None:
        value, key = older, "rope.scale_linear"
    value = value or 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise h.wrong(key, f"must be a number of at least 0, got {value!r}")
    return float(value)


def factors(h: GGUFHeader, tensor: str, scale: float) -> list[float]:
    """The divisors of frequencies, times `scale`, that of positions. ValueError: not one for each of them, or one
    that is not positive."""
    values = h.values(tensor)
    expected = h.get("rope.dimension_count", h.head_dim) // 2
    if len(values) != expected or not all(0 < value < math.inf for value in values):
        raise h.error(f"tensor {tensor} must have {expected} positive values, got {len(values)}: {values[:4]}")
    return [value * scale for value in values]


def _factors(h: GGUFHeader, scale: float) -> Config:
    return {"rope_type": "factors", "factors": factors(h, ROPE_FACTORS, scale)}


def _long(h: GGUFHeader, scale: float) -> Config:
    """The factors of long contexts and of short ones."""
    rope = {
        "rope_type": "longrope",
        "long_factor": factors(h, LONG_FACTORS, scale),
        "short_factor": factors(h, "rope_factors_short.weight", scale),
        "original_max_position_embeddings": h.get("rope.scaling.original_context_length", h.context),
    }
    if (factor := h.get("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = factor
    return rope


def _yarn(h: GGUFHeader) -> Config:
    # -1 stands for the usual value.
    if (extrapolation := h.get("rope.scaling.yarn_ext_factor", 1.0)) not in (1.0, -1.0):
        raise h.error(f"{h.architecture}.rope.scaling.yarn_ext_factor={extrapolation} is not supported, only 1.0")
    given = {
        "beta_fast": h.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": h.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": h.get("rope.scaling.yarn_attn_factor"),
    }
    # The file has the divisor's weight alone; that of the dividend is 1 in all models.
    if weight := h.get("rope.scaling.yarn_log_multiplier"):
        given |= {"mscale": 1.0, "mscale_all_dim": weight}
    return {name: value for name, value in given.items() if value is not None}


def partial_rope(h: GGUFHeader) -> Config:
    return rope_parameters(h) | {"partial_rotary_factor": h.get("rope.dimension_count", h.head_dim) / h.head_dim}


def activation(h: GGUFHeader, usual: str) -> Any:
    """The MLP's activation by its name, which few files tell."""
    return h.get("hidden_activation", h.get("hidden_act", usual))


def modern(h: GGUFHeader, norm: str | None = "rms_norm_eps", activation: str | None = "silu") -> Config:
    """Entries that most architectures since Llama call by the same names; `norm` is None where the epsilon is fixed."""
    config: Config = {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "num_key_value_heads": h.kv_heads,
        "intermediate_size": h.uniform("feed_forward_length"),
        "max_position_embeddings": h.context,
        "rope_parameters": rope_parameters(h),
        "hidden_act": activation,
    }
    if norm == "rms_norm_eps":
        config[norm] = h.get("attention.layer_norm_rms_epsilon", 1e-6)
    elif norm is not None:
        config[norm] = h.get("attention.layer_norm_epsilon", 1e-5)
    return config


def layer_types(h: GGUFHeader, every: int) -> list[str]:
    """Each `every`-th layer sees all, where the header does not say otherwise."""
    pattern = h.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        return [SLIDING if slides else FULL for slides in pattern]
    return [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(h.layers)]


def every(number: int) -> Callable[[GGUFHeader], list[str]]:
    """`layer_types` of each `number`-th layer."""
    return lambda h: layer_types(h, number)


def _get(key: str, default: Any = None) -> Callable[[GGUFHeader], Any]:
    return lambda h: h.get(key, default)


def _need(key: str) -> Callable[[GGUFHeader], Any]:
    return lambda h: h.need(key)


def _has(tensor: str) -> Callable[[GGUFHeader], bool]:
    return lambda h: h.has(tensor)


# The values of config.json's entries, whatever the architecture.
_ENTRIES: dict[str, Callable[[GGUFHeader], Any]] = {
    "head_dim": lambda h: h.head_dim,
    **dict.fromkeys(("attention_bias", "qkv_bias", "use_bias", "use_qkv_bias"), _has("blk.0.attn_q.bias")),
    "attention_out_bias": _has("blk.0.attn_output.bias"),
    "mlp_bias": _has("blk.0.ffn_up.bias"),
    "lm_head_bias": _has("output.bias"),
    **dict.fromkeys(("qk_layernorm", "qk_norm", "use_qk_norm"), _has("blk.0.attn_q_norm.weight")),
    "clip_qkv": _get("attention.clamp_kqv"),
    "sliding_window": _need("attention.sliding_window"),
    "attention_multiplier": _get("attention.scale", 1.0),
    "embedding_multiplier": _get("embedding_scale", 1.0),
    "residual_multiplier": _get("residual_scale", 1.0),
    "logits_scaling": _get("logit_scale", 1.0),
    "logit_scale": _need("logit_scale"),
    "attn_logit_softcapping": _get("attn_logit_softcapping"),
    "final_logit_softcapping": _get("final_logit_softcapping"),
    **dict.fromkeys(("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts"), _need("expert_count")),
    **dict.fromkeys(("moe_k", "moe_topk", "num_experts_per_tok", "top_k_experts"), _need("expert_used_count")),
    **dict.fromkeys(
        ("moe_num_shared_experts", "n_shared_experts", "num_shared_experts"), _get("expert_shared_count", 0)
    ),
    **dict.fromkeys(
        ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), _get("leading_dense_block_count", 0)
    ),
    "moe_layer_interval": _get("interleave_moe_layer_step", 1),
    "moe_intermediate_size": _need("expert_feed_forward_length"),
    **dict.fromkeys(("route_scale", "routed_scaling_factor"), _get("expert_weights_scale", 1.0)),
    "norm_topk_prob": _get("expert_weights_norm", False),
    "n_group": lambda h: h.get("expert_group_count") or 1,
    "topk_group": lambda h: h.get("expert_group_used_count") or 1,
}


def pick(h: GGUFHeader, names: str) -> Config:
    """The entries `names`, with spaces between them."""
    return {name: _ENTRIES[name](h) for name in names.split()}


def entries(
    names: str = "",
    *,
    norm: str | None = "rms_norm_eps",
    activation: str | None = "silu",
    more: Callable[[GGUFHeader], Config] | None = None,
    **others: Any,
) -> Callable[[GGUFHeader], Config]:
    """A maker of the usual entries (see `modern`), those that `names` lists, and `others`: values, or functions of the
    header. What `more` gives counts most."""

    def config(h: GGUFHeader) -> Config:
        given = {name: value(h) if callable(value) else value for name, value in others.items()}
        return modern(h, norm, activation) | pick(h, names) | given | (more(h) if more is not None else {})

    return config


with_head_dim = entries("head_dim")
