"""config.json of each of GGUF's architectures, from the header.

Keys and their meaning are those of llama.cpp's converter (convert_hf_to_gguf.py). What it leaves out because it is the
same in all published models of an architecture stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.model_executor.model_loader.gguf_file import GGUFFile
from vllm.model_executor.model_loader.gguf_header import GGUFHeader

Config = dict[str, Any]
_ROPE_FACTORS = "rope_freqs.weight"
_SLIDING, _FULL = "sliding_attention", "full_attention"


def hf_config(file: GGUFFile, dtype: str) -> Config:
    """The contents of config.json; ValueError for an unsupported architecture, or a value that the header lacks."""
    architecture = file.metadata.get("general.architecture", "")
    if architecture not in _CONFIGS:
        known = ", ".join(sorted(_CONFIGS))
        raise ValueError(f"{file.path.name}: general.architecture must be one of {known}, got {architecture!r}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path.name} has no tensor token_embd.weight")
    name, model_type, build = _CONFIGS[architecture]
    header = GGUFHeader(file)
    config = {
        "architectures": [name],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": header.rows("token_embd.weight"),
        "tie_word_embeddings": not header.has("output.weight"),
        **build(header),
        **special_ids(file),
    }
    return {key: value for key, value in config.items() if value is not None}


def special_ids(file: GGUFFile) -> Config:
    """The known ones of bos_token_id, pad_token_id and eos_token_id (a list if turns and texts end differently)."""
    get = file.metadata.get
    eos = [get(f"tokenizer.ggml.{name}") for name in ("eos_token_id", "eot_token_id")]
    eos_ids = list(dict.fromkeys(value for value in eos if value is not None))
    ids = {
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": (eos_ids if len(eos_ids) > 1 else eos_ids[0]) if eos_ids else None,
    }
    return {name: value for name, value in ids.items() if value is not None}


def _rope(h: GGUFHeader, theta: float = 10000.0) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": h.get("rope.freq_base", theta)}
    if h.has(_ROPE_FACTORS):
        return rope | {"rope_type": "factors", "factors": h.values(_ROPE_FACTORS)}
    kind = h.get("rope.scaling.type", "none")
    if kind != "none" and not (kind == "linear" and h.get("rope.scaling.factor") == 1.0):
        rope |= {"rope_type": kind, "factor": h.need("rope.scaling.factor")}
        if (original := h.get("rope.scaling.original_context_length")) is not None:
            rope["original_max_position_embeddings"] = original
    return rope


def _partial_rope(h: GGUFHeader) -> Config:
    return _rope(h) | {"partial_rotary_factor": h.get("rope.dimension_count", h.head_dim) / h.head_dim}


def _modern(h: GGUFHeader, norm: str | None = "rms_norm_eps", activation: str = "silu") -> Config:
    """What most architectures since Llama call by the same names; `norm` is None where the epsilon is fixed."""
    config: Config = {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "num_key_value_heads": h.kv_heads,
        "intermediate_size": h.uniform("feed_forward_length"),
        "max_position_embeddings": h.need("context_length"),
        "rope_parameters": _rope(h),
        "hidden_act": activation,
    }
    if norm == "rms_norm_eps":
        config[norm] = h.get("attention.layer_norm_rms_epsilon", 1e-6)
    elif norm is not None:
        config[norm] = h.get("attention.layer_norm_epsilon", 1e-5)
    return config


def _biased(h: GGUFHeader) -> bool:
    return h.has("blk.0.attn_q.bias")


def _with_head_dim(h: GGUFHeader) -> Config:
    return _modern(h) | {"head_dim": h.head_dim}


def _llama(h: GGUFHeader) -> Config:
    return _with_head_dim(h) | {"attention_bias": _biased(h)}


def _baichuan(h: GGUFHeader) -> Config:
    # The header does not say it: the model of 40 layers has ALiBi.
    if h.layers == 40:
        raise ValueError(
            f"{h.file.path.name}: Baichuan with 40 layers has ALiBi, which GGUF does not tell; "
            "load the model's Hugging Face checkpoint"
        )
    return _llama(h)


def _qwen(h: GGUFHeader) -> Config:
    # The header counts both halves of the gated MLP.
    return _modern(h) | {"intermediate_size": h.rows("blk.0.ffn_up.weight")}


def _minicpm(h: GGUFHeader) -> Config:
    scales = {
        "attention_multiplier": h.head_dim**-0.5,
        "embedding_multiplier": h.need("embedding_scale"),
        "residual_multiplier": h.need("residual_scale"),
        "logits_scaling": h.need("logit_scale"),
    }
    if h.has("rope_factors_long.weight"):
        raise ValueError(f"{h.file.path.name}: MiniCPM's longrope is not supported in GGUF")
    return _modern(h) | scales


def _granite(h: GGUFHeader) -> Config:
    return _modern(h) | {
        "attention_multiplier": h.get("attention.scale", 1.0),
        "embedding_multiplier": h.get("embedding_scale", 1.0),
        "residual_multiplier": h.get("residual_scale", 1.0),
        "logits_scaling": h.get("logit_scale", 1.0),
    }


def _smollm3(h: GGUFHeader) -> Config:
    return _modern(h) | {"no_rope_layers": [int((index + 1) % 4 != 0) for index in range(h.layers)]}


def _gemma(h: GGUFHeader) -> Config:
    config = _with_head_dim(h)
    activation = config.pop("hidden_act") and "gelu_pytorch_tanh"
    return config | {"hidden_activation": activation, "tie_word_embeddings": True}


def _gemma2(h: GGUFHeader) -> Config:
    # The model of 46 layers, 27B, scales by the width of a head's share of the hidden size.
    scalar = h.hidden // h.heads if h.layers == 46 else h.head_dim
    return _gemma(h) | {
        "attn_logit_softcapping": h.get("attn_logit_softcapping"),
        "final_logit_softcapping": h.get("final_logit_softcapping"),
        "sliding_window": h.get("attention.sliding_window", 4096),
        "query_pre_attn_scalar": scalar,
        "layer_types": _layer_types(h, 2),
    }


def _gemma3(h: GGUFHeader) -> Config:
    # The model of 62 layers, 27B, scales by the width of a head's share of the hidden size.
    scalar = h.hidden // h.heads if h.layers == 62 else h.head_dim
    local = {"rope_type": "default", "rope_theta": h.get("rope.freq_base_swa", 10000.0)}
    return _gemma(h) | {
        "sliding_window": h.get("attention.sliding_window", 1024),
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": h.get("final_logit_softcapping"),
        "layer_types": _layer_types(h, 6),
        "rope_parameters": {_FULL: _rope(h, 1e6), _SLIDING: local},
    }


def _layer_types(h: GGUFHeader, every: int) -> list[str]:
    """Each `every`-th layer sees all, where the header does not say otherwise."""
    pattern = h.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        return [_SLIDING if slides else _FULL for slides in pattern]
    return [_FULL if (index + 1) % pattern == 0 else _SLIDING for index in range(h.layers)]


def _phi2(h: GGUFHeader) -> Config:
    return _modern(h, "layer_norm_eps", "gelu_new") | {"rope_parameters": _partial_rope(h)}


def _phi3(h: GGUFHeader) -> Config:
    rope = _partial_rope(h)
    config = _modern(h) | {"sliding_window": h.get("attention.sliding_window") or None}
    if h.has("rope_factors_long.weight"):
        original = h.need("rope.scaling.original_context_length")
        rope |= {
            "rope_type": "longrope",
            "long_factor": h.values("rope_factors_long.weight"),
            "short_factor": h.values("rope_factors_short.weight"),
            "original_max_position_embeddings": original,
        }
        config["original_max_position_embeddings"] = original
        if (factor := h.get("rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = factor
    return config | {"rope_parameters": rope}


def _gpt2(h: GGUFHeader) -> Config:
    return {
        "n_embd": h.hidden,
        "n_layer": h.layers,
        "n_head": h.heads,
        "n_inner": h.uniform("feed_forward_length"),
        "n_positions": h.need("context_length"),
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _starcoder(h: GGUFHeader) -> Config:
    return _gpt2(h) | {"activation_function": "gelu_pytorch_tanh", "multi_query": h.kv_heads == 1}


def _gpt_neox(h: GGUFHeader) -> Config:
    config = _modern(h, "layer_norm_eps", "gelu")
    del config["num_key_value_heads"]
    rope = {"rope_parameters": _partial_rope(h)}
    return config | rope | {"use_parallel_residual": h.get("use_parallel_residual", True)}


def _bloom(h: GGUFHeader) -> Config:
    return {
        "hidden_size": h.hidden,
        "n_layer": h.layers,
        "n_head": h.heads,
        "seq_length": h.need("context_length"),
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
    }


def _falcon(h: GGUFHeader) -> Config:
    norms = 2 if h.has("blk.0.attn_norm_2.weight") else 1
    is_new = norms == 2 or h.kv_heads > 1
    return {
        "hidden_size": h.hidden,
        "num_hidden_layers": h.layers,
        "num_attention_heads": h.heads,
        "num_kv_heads": h.kv_heads,
        "ffn_hidden_size": h.uniform("feed_forward_length"),
        "max_position_embeddings": h.need("context_length"),
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": norms if is_new else None,
        "multi_query": True,
        "parallel_attn": True,
        "bias": h.has("blk.0.attn_qkv.bias"),
        "alibi": False,
        "rope_parameters": _rope(h),
        "activation": "gelu",
    }


def _mpt(h: GGUFHeader) -> Config:
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
        "max_seq_len": h.need("context_length"),
        "expansion_ratio": h.uniform("feed_forward_length") // h.hidden,
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
        "no_bias": not h.has("blk.0.attn_norm.bias"),
        "attn_config": attention,
    }


def _starcoder2(h: GGUFHeader) -> Config:
    return _modern(h, "norm_epsilon", "gelu_pytorch_tanh") | {
        "use_bias": _biased(h),
        "sliding_window": h.get("attention.sliding_window"),
    }


def _stablelm(h: GGUFHeader) -> Config:
    return _modern(h, "layer_norm_eps") | {
        "rope_parameters": _partial_rope(h),
        "use_parallel_residual": h.get("use_parallel_residual", False),
        "use_qkv_bias": _biased(h),
        "qk_layernorm": h.has("blk.0.attn_q_norm.weight"),
    }


def _olmo(h: GGUFHeader) -> Config:
    return _modern(h, None) | {"clip_qkv": h.get("attention.clamp_kqv")}


def _cohere(h: GGUFHeader) -> Config:
    return _modern(h, "layer_norm_eps") | {
        "logit_scale": h.need("logit_scale"),
        "use_qk_norm": h.has("blk.0.attn_q_norm.weight"),
        "attention_bias": _biased(h),
    }


def _cohere2(h: GGUFHeader) -> Config:
    return _modern(h, "layer_norm_eps") | {
        "logit_scale": h.need("logit_scale"),
        "sliding_window": h.need("attention.sliding_window"),
        "layer_types": _layer_types(h, 4),
        "attention_bias": _biased(h),
    }


def _glm(h: GGUFHeader) -> Config:
    fused = h.has("blk.0.attn_qkv.weight")
    # A header of a model with an explicit head size may give only the rotary share of it, which is a half.
    head_dim = h.get("attention.key_length", h.hidden // h.heads)
    rope = _rope(h) | {"partial_rotary_factor": h.get("rope.dimension_count", head_dim // 2) / head_dim}
    return _modern(h) | {
        "head_dim": head_dim,
        "rope_parameters": rope,
        "attention_bias": h.has("blk.0.attn_qkv.bias") if fused else _biased(h),
    }


def _exaone4(h: GGUFHeader) -> Config:
    window = h.get("attention.sliding_window")
    kinds = _layer_types(h, 4) if window else [_FULL] * h.layers
    return _with_head_dim(h) | {"sliding_window": window, "layer_types": kinds}


def _nemotron(h: GGUFHeader) -> Config:
    return _modern(h, "norm_eps", "relu2") | {"head_dim": h.head_dim, "rope_parameters": _partial_rope(h)}


def _arcee(h: GGUFHeader) -> Config:
    return _with_head_dim(h) | {"hidden_act": "relu2", "attention_bias": _biased(h)}


def _seed_oss(h: GGUFHeader) -> Config:
    return _with_head_dim(h) | {
        "attention_bias": _biased(h),
        "attention_out_bias": h.has("blk.0.attn_output.bias"),
    }


# GGUF's name: the name in config.json's architectures, its model_type, and what makes the rest. One that is another's
# under other names is loaded as that one.
_CONFIGS: dict[str, tuple[str, str, Callable[[GGUFHeader], Config]]] = {
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "internlm2": ("LlamaForCausalLM", "llama", _llama),
    "exaone": ("LlamaForCausalLM", "llama", _llama),
    "xverse": ("LlamaForCausalLM", "llama", _llama),
    "baichuan": ("LlamaForCausalLM", "llama", _baichuan),
    "qwen": ("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _with_head_dim),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _with_head_dim),
    "minicpm": ("GraniteForCausalLM", "granite", _minicpm),
    "granite": ("GraniteForCausalLM", "granite", _granite),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _smollm3),
    "arcee": ("ArceeForCausalLM", "arcee", _arcee),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss", _seed_oss),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5", _with_head_dim),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _with_head_dim),
    "gemma": ("GemmaForCausalLM", "gemma", _gemma),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "phi2": ("PhiForCausalLM", "phi", _phi2),
    "phi3": ("Phi3ForCausalLM", "phi3", _phi3),
    "gpt2": ("GPT2LMHeadModel", "gpt2", _gpt2),
    "starcoder": ("GPTBigCodeForCausalLM", "gpt_bigcode", _starcoder),
    "gptneox": ("GPTNeoXForCausalLM", "gpt_neox", _gpt_neox),
    "bloom": ("BloomForCausalLM", "bloom", _bloom),
    "falcon": ("FalconForCausalLM", "falcon", _falcon),
    "mpt": ("MptForCausalLM", "mpt", _mpt),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
    "stablelm": ("StableLmForCausalLM", "stablelm", _stablelm),
    "olmo": ("OlmoForCausalLM", "olmo", _olmo),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _modern),
    "command-r": ("CohereForCausalLM", "cohere", _cohere),
    "cohere2": ("Cohere2ForCausalLM", "cohere2", _cohere2),
    "glm4": ("Glm4ForCausalLM", "glm4", _glm),
    "chatglm": ("GlmForCausalLM", "glm", _glm),
    "exaone4": ("Exaone4ForCausalLM", "exaone4", _exaone4),
    "nemotron": ("NemotronForCausalLM", "nemotron", _nemotron),
}

ARCHITECTURES = tuple(_CONFIGS)
