"""Options that hybrids' config.json have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm.models.config_reader import ConfigReader
from vllm.models.states.specs import DeltaRuleSpec, Mamba2Spec

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


def mamba2_of_hybrid(reader: ConfigReader, inner: int | None = None, **fields: Any) -> Mamba2Spec:
    """By the options of Bamba and its kin, whose names begin with mamba; `inner` is the family's default of
    mamba_d_ssm, `fields` are those of Mamba2Spec."""
    reader.ignore("mamba_chunk_size")
    reader.only("hidden_act", "silu")
    expanded = reader.integer("mamba_expand", default=2) * reader.hidden_size
    if inner is not None:
        inner = reader.integer("mamba_d_ssm", default=expanded if reader.is_given("mamba_d_ssm") else inner)
    else:
        inner = expanded
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


def delta_rule(
    reader: ConfigReader, key_heads: int, heads: int, key_dim: int, value_dim: int, eps: float, scale: float = 1.0
) -> DeltaRuleSpec:
    """By the options whose names begin with linear; sizes are the family's defaults, `eps` is the norm's and `scale` of
    what is written."""
    reader.only("hidden_act", "silu")
    spec = DeltaRuleSpec(
        key_heads=reader.integer("linear_num_key_heads", default=key_heads),
        heads=reader.integer("linear_num_value_heads", default=heads),
        key_dim=reader.integer("linear_key_head_dim", default=key_dim),
        value_dim=reader.integer("linear_value_head_dim", default=value_dim),
        kernel_size=reader.integer("linear_conv_kernel_dim", default=4),
        norm_eps=eps,
        beta_scale=scale,
    )
    if spec.heads % spec.key_heads:
        raise reader.refuse("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads={spec.key_heads}")
    return spec
