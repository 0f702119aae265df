"""What the configurations of several of GGUF's architectures have in common."""

from __future__ import annotations

import math
from typing import Any

from vllm.loader.gguf.header import GGUFHeader

Config = dict[str, Any]
ROPE_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_long.weight"
# What config.json has as null, in place of a default.
NULL = object()
SLIDING, FULL = "sliding_attention", "full_attention"


def rope_parameters(h: GGUFHeader, theta: float = 10000.0) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": h.get("rope.freq_base", theta)}
    if h.has(ROPE_FACTORS):
        return rope | {"rope_type": "factors", "factors": factors(h, ROPE_FACTORS)}
    kind = h.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise h.wrong("rope.scaling.type", f"must be one of none, linear, yarn, longrope, got {kind!r}")
    if h.has(LONG_FACTORS):
        return rope | _long(h)
    if kind == "longrope":
        raise ValueError(f"{h.file.path.name} has rope.scaling.type=longrope, but no tensor {LONG_FACTORS}")
    # A factor of 0 stands for none.
    if kind != "none" and not (kind == "linear" and h.get("rope.scaling.factor") in (0.0, 1.0)):
        rope |= {"rope_type": kind, "factor": h.need("rope.scaling.factor")}
        if (original := h.get("rope.scaling.original_context_length")) is not None:
            rope["original_max_position_embeddings"] = original
    return rope | _yarn(h) if kind == "yarn" else rope


def factors(h: GGUFHeader, tensor: str) -> list[float]:
    """What frequencies are divided by. ValueError: not one for each of them, or one that is not positive."""
    values = h.values(tensor)
    expected = h.get("rope.dimension_count", h.head_dim) // 2
    if len(values) != expected or not all(0 < value < math.inf for value in values):
        raise h.error(f"tensor {tensor} must have {expected} positive values, got {len(values)}: {values[:4]}")
    return values


def _long(h: GGUFHeader) -> Config:
    """The factors of long contexts and of short ones."""
    rope = {
        "rope_type": "longrope",
        "long_factor": factors(h, LONG_FACTORS),
        "short_factor": factors(h, "rope_factors_short.weight"),
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


def modern(h: GGUFHeader, norm: str | None = "rms_norm_eps", activation: str = "silu") -> Config:
    """What most architectures since Llama call by the same names; `norm` is None where the epsilon is fixed."""
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


def is_biased(h: GGUFHeader) -> bool:
    return h.has("blk.0.attn_q.bias")


def with_head_dim(h: GGUFHeader) -> Config:
    return modern(h) | {"head_dim": h.head_dim}


def granite(h: GGUFHeader) -> Config:
    return modern(h) | {
        "attention_multiplier": h.get("attention.scale", 1.0),
        "embedding_multiplier": h.get("embedding_scale", 1.0),
        "residual_multiplier": h.get("residual_scale", 1.0),
        "logits_scaling": h.get("logit_scale", 1.0),
    }


def layer_types(h: GGUFHeader, every: int) -> list[str]:
    """Each `every`-th layer sees all, where the header does not say otherwise."""
    pattern = h.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        return [SLIDING if slides else FULL for slides in pattern]
    return [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(h.layers)]
