"""config.json of GGUF's Gemma architectures, from the header."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

from vllm.loader.gguf.config_parts import (
    FULL,
    SLIDING,
    Config,
    entries,
    every,
    layer_types,
    rope_parameters,
)
from vllm.loader.gguf.header import GGUFHeader


def _ropes(h: GGUFHeader) -> Config:
    local = {"rope_type": "default", "rope_theta": h.get("rope.freq_base_swa", 10000.0)}
    return {FULL: rope_parameters(h, 1e6), SLIDING: local}


def _scale(num_layers: int) -> Callable[[GGUFHeader], int]:
    """Scores are scaled by the size of a head; in the model of so many layers, 27B, by its share of the hidden size."""
    return lambda h: h.hidden // h.heads if h.layers == num_layers else h.head_dim


_gemma = partial(entries, activation=None, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
gemma = _gemma("head_dim")
gemma2 = _gemma(
    "head_dim attn_logit_softcapping final_logit_softcapping",
    sliding_window=lambda h: h.get("attention.sliding_window", 4096),
    query_pre_attn_scalar=_scale(46),
    layer_types=every(2),
)
gemma3 = _gemma(
    "head_dim final_logit_softcapping",
    sliding_window=lambda h: h.get("attention.sliding_window", 1024),
    query_pre_attn_scalar=_scale(62),
    layer_types=every(6),
    rope_parameters=_ropes,
)


def _proportional(h: GGUFHeader) -> Config:
    """The rotation of wide heads as transformers knows it: the file has 1 for frequencies that rotate, and for the rest
    what they are divided by to be none."""
    rope = rope_parameters(h, 1e6)
    factors = rope.pop("factors", [1.0])
    rotated = factors.count(1.0)
    if any(factor != 1.0 for factor in factors[:rotated]) or any(factor < 1e20 for factor in factors[rotated:]):
        raise h.error(f"tensor rope_freqs.weight must have ones, then 1e30, got {factors}")
    return rope | {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}


def _since_3n(h: GGUFHeader, every: int) -> Config:
    """Entries that Gemma 3n and Gemma 4 have in common."""
    width = h.get("embedding_length_per_layer_input", 0)
    return {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "max_position_embeddings": h.context,
        "rms_norm_eps": h.get("attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": h.need("attention.sliding_window"),
        "final_logit_softcapping": h.get("final_logit_softcapping"),
        "layer_types": layer_types(h, every),
        "rope_parameters": _ropes(h),
        "num_kv_shared_layers": h.need("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": h.rows("per_layer_token_embd.weight") if width else None,
    }


def gemma3n(h: GGUFHeader) -> Config:
    # The file has the quantile of each layer's share of inactive gates, -inf for none.
    quantiles = h.by_layer("activation_sparsity_scale")
    return _since_3n(h, 5) | {
        "num_key_value_heads": h.kv_heads,
        "head_dim": h.head_dim,
        "intermediate_size": h.by_layer("feed_forward_length"),
        "activation_sparsity_pattern": [NormalDist().cdf(quantile) for quantile in quantiles],
        "altup_num_inputs": h.need("altup.num_inputs"),
        "altup_active_idx": h.need("altup.active_idx"),
        "altup_correct_scale": True,
        "laurel_rank": h.rows("blk.0.laurel_l.weight"),
    }


def gemma4(h: GGUFHeader) -> Config:
    head_dim = h.need("attention.key_length_swa")
    if (rotated := h.get("rope.dimension_count_swa", head_dim)) != head_dim:
        raise h.wrong("rope.dimension_count_swa", f"must be attention.key_length_swa={head_dim}, got {rotated}")
    config = _since_3n(h, 6)
    kinds = config["layer_types"]
    num_own = h.layers - config["num_kv_shared_layers"]
    # Layers without a window may take their keys as values, those that read other layers' keys have wider MLPs.
    shares = any(kinds[index] == FULL and not h.has(f"blk.{index}.attn_v.weight") for index in range(num_own))
    widths = h.by_layer("feed_forward_length")
    is_wide = widths[-1] != widths[0]
    if widths != [widths[0] * (2 if is_wide and index >= num_own else 1) for index in range(h.layers)]:
        wanted = f"must be the same in all layers, or twice that in the last {h.layers - num_own}"
        raise h.wrong("feed_forward_length", f"{wanted}, got {widths}")
    if h.has("blk.0.ffn_gate_inp.weight"):
        config["rope_parameters"][FULL] = _proportional(h)
        config |= {
            "enable_moe_block": True,
            "num_experts": h.need("expert_count"),
            "top_k_experts": h.need("expert_used_count"),
            "moe_intermediate_size": h.need("expert_feed_forward_length"),
        }
    heads = dict(zip(kinds, h.by_layer("attention.head_count_kv"), strict=True))
    return config | {
        "head_dim": head_dim,
        "global_head_dim": h.head_dim,
        "num_key_value_heads": heads.get(SLIDING, heads[FULL]),
        "num_global_key_value_heads": heads[FULL] if shares else None,
        "attention_k_eq_v": shares,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": is_wide,
    }
