"""config.json of GGUF's dense architectures, from the header.

Keys and their meaning are those of llama.cpp's converter (convert_hf_to_gguf.py). What it leaves out because it is the
same in all published models of an architecture stands here.
"""

from __future__ import annotations

from vllm.loader.gguf import experts
from vllm.loader.gguf.config_parts import (
    FULL,
    SLIDING,
    Config,
    layer_types,
    modern,
    partial_rope,
    pick,
    rope_parameters,
    with_head_dim,
)
from vllm.loader.gguf.header import GGUFHeader


def llama(h: GGUFHeader) -> Config:
    if h.get("expert_count"):
        return experts.mixtral(h)
    return with_head_dim(h) | pick(h, "attention_bias")


def baichuan(h: GGUFHeader) -> Config:
    # The header does not say it: the model of 40 layers has ALiBi.
    if h.layers == 40:
        raise h.error(
            "Baichuan with 40 layers has ALiBi, which GGUF does not tell; load the model's Hugging Face checkpoint"
        )
    return llama(h)


def minicpm(h: GGUFHeader) -> Config:
    scales = {
        "attention_multiplier": h.head_dim**-0.5,
        "embedding_multiplier": h.need("embedding_scale"),
        "residual_multiplier": h.need("residual_scale"),
        "logits_scaling": h.need("logit_scale"),
    }
    return modern(h) | scales


def phi3(h: GGUFHeader) -> Config:
    rope = partial_rope(h)
    return modern(h) | {
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        "sliding_window": h.get("attention.sliding_window") or None,
    }


def gpt2(h: GGUFHeader) -> Config:
    return {
        "n_embd": h.hidden,
        "n_layer": h.layers,
        "n_head": h.heads,
        "n_inner": h.uniform("feed_forward_length"),
        "n_positions": h.context,
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def starcoder(h: GGUFHeader) -> Config:
    return gpt2(h) | {"activation_function": "gelu_pytorch_tanh", "multi_query": h.kv_heads == 1}


def gpt_neox(h: GGUFHeader) -> Config:
    config = modern(h, "layer_norm_eps", "gelu")
    del config["num_key_value_heads"]
    rope = {"rope_parameters": partial_rope(h)}
    return config | rope | {"use_parallel_residual": h.get("use_parallel_residual", True)}


def bloom(h: GGUFHeader) -> Config:
    return {
        "hidden_size": h.hidden,
        "n_layer": h.layers,
        "n_head": h.heads,
        "seq_length": h.context,
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
    }


def falcon(h: GGUFHeader) -> Config:
    norms = 2 if h.has("blk.0.attn_norm_2.weight") else 1
    is_new = norms == 2 or h.kv_heads > 1
    return {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "num_kv_heads": h.kv_heads,
        "ffn_hidden_size": h.uniform("feed_forward_length"),
        "max_position_embeddings": h.context,
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": norms if is_new else None,
        "multi_query": True,
        "parallel_attn": True,
        "bias": h.has("blk.0.attn_qkv.bias"),
        "alibi": False,
        "rope_parameters": rope_parameters(h),
        "activation": "gelu",
    }


def mpt(h: GGUFHeader) -> Config:
    bias_max = h.get("attention.max_alibi_bias", 0.0)
    attention = {
        "attn_type": "multihead_attention",
        "alibi": bias_max > 0,
        "clip_qkv": h.get("attention.clamp_kqv"),
        "qk_ln": False,
        "prefix_lm": False,
    }
    if bias_max:
        attention["alibi_bias_max"] = int(bias_max)
    return {
        "d_model": h.hidden,
        "n_layers": h.layers,
        "n_heads": h.heads,
        "max_seq_len": h.context,
        "expansion_ratio": h.uniform("feed_forward_length") // h.hidden,
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
        "no_bias": not h.has("blk.0.attn_norm.bias"),
        "attn_config": attention,
    }


def olmo2(h: GGUFHeader) -> Config:
    """OLMo 3 is OLMo 2 with windows, whose layers rotate without the scaling of the others."""
    window = h.get("attention.sliding_window")
    if window is None:
        return modern(h)
    theta = h.get("rope.freq_base", 10000.0)
    local = {"rope_type": "default", "rope_theta": h.get("rope.freq_base_swa", theta)}
    return modern(h) | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(h, 4),
        "rope_parameters": {FULL: rope_parameters(h), SLIDING: local},
    }


def glm(h: GGUFHeader) -> Config:
    fused = h.has("blk.0.attn_qkv.weight")
    # A header of a model with an explicit head size may give only the rotary share of it, which is a half.
    head_dim = h.get("attention.key_length", h.hidden // h.heads)
    rope = rope_parameters(h) | {"partial_rotary_factor": h.get("rope.dimension_count", head_dim // 2) / head_dim}
    return modern(h) | {
        "head_dim": head_dim,
        "rope_parameters": rope,
        "attention_bias": h.has(f"blk.0.attn_{'qkv' if fused else 'q'}.bias"),
    }


def exaone4(h: GGUFHeader) -> Config:
    window = h.get("attention.sliding_window")
    kinds = layer_types(h, 4) if window else [FULL] * h.layers
    return with_head_dim(h) | {"sliding_window": window, "layer_types": kinds}


def mistral3(h: GGUFHeader) -> Config:
    config = with_head_dim(h)
    if growth := h.get("attention.temperature_scale"):
        config["rope_parameters"]["llama_4_scaling_beta"] = growth
    return config
