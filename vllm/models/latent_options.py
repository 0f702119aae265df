"""The options of latent attention in config.json, which many families have."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm.models.config_reader import ConfigReader
from vllm.models.spec import LatentAttentionSpec, NormSpec

# The norms of the latents have this epsilon in every family, whatever rms_norm_eps is.
_EPS = 1e-6


def read_latent_attention(
    reader: ConfigReader,
    interleaved: bool,
    value_dim: int | None = None,
    shares_rope: bool = False,
    query_growth: bool = False,
    theta: float = 10000.0,
) -> LatentAttentionSpec:
    """The attention of all layers.

    Args:
        interleaved: the family's default of rope_interleave: neighbours rotate together, else halves.
        value_dim: the family's default of v_head_dim.
        shares_rope: partial_rotary_factor is the rotated values' share of a head.
        query_growth: by llama_4_scaling_beta.
        theta: the family's default of rope_theta.

    Raises:
        ValueError: an option is missing or of a wrong value.
    """
    rope_dim = reader.integer("qk_rope_head_dim")
    nope_dim = reader.integer("qk_nope_head_dim")
    reader.ignore("qk_head_dim", "kv_channels")
    if shares_rope and reader.integer("head_dim", default=nope_dim + rope_dim) != nope_dim + rope_dim:
        raise reader.refuse("head_dim", f"it must be qk_nope_head_dim + qk_rope_head_dim={nope_dim + rope_dim}")
    reader.ignore("head_dim")
    kv_heads = reader.integer("num_key_value_heads", default=reader.num_heads)
    if kv_heads != reader.num_heads:
        raise reader.refuse("num_key_value_heads", f"latent attention has as many as heads, {reader.num_heads}")
    interleaved = reader.boolean("rope_interleave", default=interleaved)
    share = rope_dim / (nope_dim + rope_dim)
    rotated_of, partial = (nope_dim + rope_dim, share) if shares_rope else (rope_dim, None)
    rotary = reader.rotary(rotated_of, interleaved, partial=partial, theta=theta)
    # A share's product with the width may be rounded down.
    if rope_dim - rotary.dim not in (0, 1):
        raise reader.refuse("rope_parameters", f"partial_rotary_factor must be qk_rope_head_dim's share, {share}")
    rotary = replace(rotary, dim=rope_dim)
    params = rotary.rope.params
    scale = (nope_dim + rope_dim) ** -0.5
    weight, factor = params.get("mscale_all_dim") or 0.0, params.get("factor", 1.0)
    if rotary.rope.rope_type != "default" and weight and factor > 1:
        scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
    growth = None
    if query_growth and params.get("llama_4_scaling_beta") is not None:
        growth = float(params["llama_4_scaling_beta"]), float(params["original_max_position_embeddings"])
    return LatentAttentionSpec(
        num_heads=reader.num_heads,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=reader.integer("v_head_dim", default=value_dim),
        latent_dim=reader.integer("kv_lora_rank"),
        query_dim=None if reader.get("q_lora_rank") is None else reader.integer("q_lora_rank"),
        rotary=rotary,
        scale=scale,
        norm=NormSpec("rms", _EPS),
        bias=reader.boolean("attention_bias", default=False),
        query_growth=growth,
    )
