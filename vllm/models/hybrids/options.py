"""Options that hybrids' config.json have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm.models.config_reader import ConfigReader
from vllm.models.spec import Mamba2Spec

UNBOUNDED = 32768
"""Context of models without attention, which config.json does not bound."""

# Older files' names of layers.
_OLDER = {"mamba": "linear_attention", "attention": "full_attention", "hybrid": "hybrid"}


def layer_kinds(reader: ConfigReader, default: Sequence[str], *known: str) -> list[str]:
    """One of `known` for each layer, by layer_types or layers_block_type, also by older names."""
    kinds = reader.get("layer_types", "layers_block_type", default=list(default))
    own = [_OLDER.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else kinds
    if not isinstance(own, list) or len(own) != reader.num_layers or set(own) - set(known):
        reason = f"it must name {' or '.join(known)} for each of {reader.num_layers} layers"
        raise reader.refuse("layer_types" if reader.get("layer_types") else "layers_block_type", reason)
    return own


def time_step_limits(reader: ConfigReader) -> tuple[float, float]:
    """The least and the greatest step of a state space."""
    limits = reader.get("time_step_limit", default=(0.0, math.inf))
    if isinstance(limits, Sequence) and len(limits) == 2:
        # How transformers writes what JSON has no number for.
        own = [float(each["__float__"]) if isinstance(each, dict) and "__float__" in each else each for each in limits]
        if all(isinstance(each, int | float) for each in own):
            return float(own[0]), float(own[1])
    raise reader.refuse("time_step_limit", "it must have two numbers")


def mamba2_of_hybrid(reader: ConfigReader, **fields: Any) -> Mamba2Spec:
    """By the options of Bamba and its kin, whose names begin with mamba; `fields` are those of Mamba2Spec."""
    reader.ignore("mamba_chunk_size")
    reader.only("hidden_act", "silu")
    inner = reader.integer("mamba_d_ssm", default=reader.integer("mamba_expand", default=2) * reader.hidden_size)
    heads = reader.integer("mamba_n_heads", default=128)
    head_dim = reader.get("mamba_d_head", default="auto")
    if inner % heads or head_dim not in ("auto", inner // heads):
        raise reader.refuse("mamba_d_head", f"its product with mamba_n_heads={heads} must be {inner}")
    groups = reader.integer("mamba_n_groups", default=1)
    if heads % groups:
        raise reader.refuse("mamba_n_groups", f"it must divide mamba_n_heads={heads}")
    usual: dict[str, Any] = {
        "norm_groups": groups,
        "norm_eps": reader.norm(eps=1e-5).eps,
        "conv_bias": reader.boolean("mamba_conv_bias", default=True),
        "in_bias": (has_bias := reader.boolean("mamba_proj_bias", default=False)),
        "out_bias": has_bias,
        "dt_limits": time_step_limits(reader),
    }
    return Mamba2Spec(
        heads,
        inner // heads,
        reader.integer("mamba_d_state", default=256),
        groups,
        reader.integer("mamba_d_conv", default=4),
        **(usual | fields),
    )
