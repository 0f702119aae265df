"""Entries of config.json of decoders with recurrent states."""

from __future__ import annotations

from vllm.loader.gguf.config_parts import FULL, Config, pick, rope_parameters
from vllm.loader.gguf.header import GGUFHeader


def lfm2(h: GGUFHeader) -> Config:
    """LFM2. A layer without heads of keys is a convolution."""
    heads = h.by_layer("attention.head_count_kv")
    counts = set(heads) - {0}
    if len(counts) > 1:
        raise h.wrong("attention.head_count_kv", f"must be the same in all layers that have any, got {heads}")
    return {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "num_key_value_heads": counts.pop() if counts else h.heads,
        "intermediate_size": h.uniform("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "max_position_embeddings": h.context,
        "rope_parameters": rope_parameters(h, 1000000.0),
        "norm_eps": h.get("attention.layer_norm_rms_epsilon", 1e-5),
        "conv_L_cache": h.need("shortconv.l_cache"),
        "layer_types": [FULL if count else "conv" for count in heads],
    }


def lfm2_moe(h: GGUFHeader) -> Config:
    """LFM2 with experts."""
    config = lfm2(h) | pick(h, "num_experts num_experts_per_tok moe_intermediate_size num_dense_layers")
    del config["block_auto_adjust_ff_dim"]
    # The file does not say so: all have it.
    return config | {"norm_topk_prob": True, "use_expert_bias": h.has(f"blk.{h.layers - 1}.exp_probs_b.bias")}
