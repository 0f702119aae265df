"""config.json of each of GGUF's architectures, from the header.

Keys and their meaning are those of llama.cpp's converter (convert_hf_to_gguf.py). What it leaves out because it is the
same in all published models of an architecture stands here.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.loader.gguf import encoders, experts, gemma, mla
from vllm.loader.gguf.config_parts import (
    FULL,
    NULL,
    SLIDING,
    Config,
    granite,
    is_biased,
    layer_types,
    modern,
    partial_rope,
    rope_parameters,
    with_head_dim,
)
from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.header import GGUFHeader
from vllm.loader.gguf.special import special_ids
from vllm.models.registry import ModelRegistry


def hf_config(file: GGUFFile, dtype: str) -> Config:
    """The contents of config.json; ValueError for an unsupported architecture, or a value that the header lacks."""
    architecture = file.metadata.get("general.architecture", "")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise ValueError(f"{file.path.name}: general.type must be model, got {kind!r}")
    if (reason := _REFUSED.get(architecture)) is not None:
        raise ValueError(f"{file.path.name}: general.architecture={architecture} is not supported: {reason}")
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
    _check_rotated(header, config)
    if ModelRegistry.find(config["architectures"]) is None:
        _rename_factors(header, config)
    config = encoders.classifier(header, config)
    if header.get("attention.causal", True) is False and architecture not in encoders.BOTH_WAYS:
        config["is_causal"] = False
    return {key: None if value is NULL else value for key, value in config.items() if value is not None}


def _check_rotated(h: GGUFHeader, config: Config) -> None:
    """ValueError: the header rotates a part of each head in an architecture that rotates all of it."""
    rope = config.get("rope_parameters") or {}
    rotated = h.get("rope.dimension_count", h.head_dim)
    is_whole = "rope_type" in rope and "partial_rotary_factor" not in rope and "qk_rope_head_dim" not in config
    if is_whole and rotated != h.head_dim:
        key = f"{h.architecture}.rope.dimension_count"
        raise ValueError(f"{h.file.path.name}: {key} must be the size of a head, {h.head_dim}, got {rotated!r}")


def _rename_factors(h: GGUFHeader, config: Config) -> None:
    """transformers' modules know divisors of frequencies as those of long contexts and of short ones."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "factors":
        divisors = rope.pop("factors")
        rope |= {"rope_type": "longrope", "long_factor": divisors, "short_factor": divisors, "attention_factor": 1.0}
        rope["original_max_position_embeddings"] = h.context


def _llama(h: GGUFHeader) -> Config:
    if h.get("expert_count"):
        return experts.mixtral(h)
    return with_head_dim(h) | {"attention_bias": is_biased(h)}


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
    return modern(h) | {"intermediate_size": h.rows("blk.0.ffn_up.weight")}


def _minicpm(h: GGUFHeader) -> Config:
    scales = {
        "attention_multiplier": h.head_dim**-0.5,
        "embedding_multiplier": h.need("embedding_scale"),
        "residual_multiplier": h.need("residual_scale"),
        "logits_scaling": h.need("logit_scale"),
    }
    return modern(h) | scales


def _smollm3(h: GGUFHeader) -> Config:
    return modern(h) | {"no_rope_layers": [int((index + 1) % 4 != 0) for index in range(h.layers)]}


def _phi2(h: GGUFHeader) -> Config:
    return modern(h, "layer_norm_eps", "gelu_new") | {"rope_parameters": partial_rope(h)}


def _phi3(h: GGUFHeader) -> Config:
    rope = partial_rope(h)
    return modern(h) | {
        "rope_parameters": rope,
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        "sliding_window": h.get("attention.sliding_window") or None,
    }


def _gpt2(h: GGUFHeader) -> Config:
    return {
        "n_embd": h.hidden,
        "n_layer": h.layers,
        "n_head": h.heads,
        "n_inner": h.uniform("feed_forward_length"),
        "n_positions": h.context,
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _starcoder(h: GGUFHeader) -> Config:
    return _gpt2(h) | {"activation_function": "gelu_pytorch_tanh", "multi_query": h.kv_heads == 1}


def _gpt_neox(h: GGUFHeader) -> Config:
    config = modern(h, "layer_norm_eps", "gelu")
    del config["num_key_value_heads"]
    rope = {"rope_parameters": partial_rope(h)}
    return config | rope | {"use_parallel_residual": h.get("use_parallel_residual", True)}


def _bloom(h: GGUFHeader) -> Config:
    return {
        "hidden_size": h.hidden,
        "n_layer": h.layers,
        "n_head": h.heads,
        "seq_length": h.context,
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
        "max_seq_len": h.context,
        "expansion_ratio": h.uniform("feed_forward_length") // h.hidden,
        "layer_norm_epsilon": h.need("attention.layer_norm_epsilon"),
        "no_bias": not h.has("blk.0.attn_norm.bias"),
        "attn_config": attention,
    }


def _starcoder2(h: GGUFHeader) -> Config:
    return modern(h, "norm_epsilon", "gelu_pytorch_tanh") | {
        "use_bias": is_biased(h),
        "sliding_window": h.get("attention.sliding_window"),
    }


def _stablelm(h: GGUFHeader) -> Config:
    return modern(h, "layer_norm_eps") | {
        "rope_parameters": partial_rope(h),
        "use_parallel_residual": h.get("use_parallel_residual", False),
        "use_qkv_bias": is_biased(h),
        "qk_layernorm": h.has("blk.0.attn_q_norm.weight"),
    }


def _olmo(h: GGUFHeader) -> Config:
    return modern(h, None) | {"clip_qkv": h.get("attention.clamp_kqv")}


def _olmo2(h: GGUFHeader) -> Config:
    """OLMo 3 is OLMo 2 with windows, whose layers rotate without the scaling of the others."""
    window = h.get("attention.sliding_window")
    if window is None:
        return modern(h)
    local = {"rope_type": "default", "rope_theta": h.get("rope.freq_base", 10000.0)}
    return modern(h) | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types(h, 4),
        "rope_parameters": {FULL: rope_parameters(h), SLIDING: local},
    }


def _cohere(h: GGUFHeader) -> Config:
    return modern(h, "layer_norm_eps") | {
        "logit_scale": h.need("logit_scale"),
        "use_qk_norm": h.has("blk.0.attn_q_norm.weight"),
        "attention_bias": is_biased(h),
    }


def _cohere2(h: GGUFHeader) -> Config:
    return modern(h, "layer_norm_eps") | {
        "logit_scale": h.need("logit_scale"),
        "sliding_window": h.need("attention.sliding_window"),
        "layer_types": layer_types(h, 4),
        "attention_bias": is_biased(h),
    }


def _glm(h: GGUFHeader) -> Config:
    fused = h.has("blk.0.attn_qkv.weight")
    # A header of a model with an explicit head size may give only the rotary share of it, which is a half.
    head_dim = h.get("attention.key_length", h.hidden // h.heads)
    rope = rope_parameters(h) | {"partial_rotary_factor": h.get("rope.dimension_count", head_dim // 2) / head_dim}
    return modern(h) | {
        "head_dim": head_dim,
        "rope_parameters": rope,
        "attention_bias": h.has("blk.0.attn_qkv.bias") if fused else is_biased(h),
    }


def _exaone4(h: GGUFHeader) -> Config:
    window = h.get("attention.sliding_window")
    kinds = layer_types(h, 4) if window else [FULL] * h.layers
    return with_head_dim(h) | {"sliding_window": window, "layer_types": kinds}


def _nemotron(h: GGUFHeader) -> Config:
    return modern(h, "norm_eps", "relu2") | {"head_dim": h.head_dim, "rope_parameters": partial_rope(h)}


def _arcee(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {"hidden_act": "relu2", "attention_bias": is_biased(h)}


def _seed_oss(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {
        "attention_bias": is_biased(h),
        "attention_out_bias": h.has("blk.0.attn_output.bias"),
    }


def _apertus(h: GGUFHeader) -> Config:
    return with_head_dim(h) | {
        "hidden_act": "xielu",
        "attention_bias": is_biased(h),
        "qk_norm": h.has("blk.0.attn_q_norm.weight"),
    }


def _jais2(h: GGUFHeader) -> Config:
    return modern(h, "layer_norm_eps", "relu2") | {
        "head_dim": h.head_dim,
        "attention_bias": is_biased(h),
        "mlp_bias": h.has("blk.0.ffn_up.bias"),
    }


def _mistral3(h: GGUFHeader) -> Config:
    config = with_head_dim(h)
    if growth := h.get("attention.temperature_scale"):
        config["rope_parameters"]["llama_4_scaling_beta"] = growth
    return config


def _bitnet(h: GGUFHeader) -> Config:
    # Files that do not name the activation are of the models before b1.58 2B4T.
    return with_head_dim(h) | {"hidden_act": h.get("hidden_act", "silu")}


# GGUF's name: the name in config.json's architectures, its model_type, and what makes the rest. One that is another's
# under other names is loaded as that one.
_CONFIGS: dict[str, tuple[str, str, Callable[[GGUFHeader], Config]]] = {
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "internlm2": ("LlamaForCausalLM", "llama", _llama),
    "exaone": ("LlamaForCausalLM", "llama", _llama),
    "xverse": ("LlamaForCausalLM", "llama", _llama),
    "baichuan": ("LlamaForCausalLM", "llama", _baichuan),
    "qwen": ("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", with_head_dim),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", with_head_dim),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe", experts.qwen2_moe),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", experts.qwen3_moe),
    "qwen2vl": ("Qwen2ForCausalLM", "qwen2", with_head_dim),
    "qwen3vl": ("Qwen3ForCausalLM", "qwen3", with_head_dim),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", "qwen3_moe", experts.qwen3_moe),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", experts.gpt_oss),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe", experts.granite_moe),
    "deepseek2": ("DeepseekV3ForCausalLM", "deepseek_v3", mla.deepseek2),
    "dots1": ("Dots1ForCausalLM", "dots1", experts.dots1),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe", experts.glm4_moe),
    "ernie4_5-moe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", experts.ernie4_5_moe),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", experts.hunyuan_moe),
    "minimax-m2": ("MiniMaxM2ForCausalLM", "minimax_m2", experts.minimax_m2),
    "afmoe": ("AfmoeForCausalLM", "afmoe", experts.afmoe),
    "exaone-moe": ("ExaoneMoeForCausalLM", "exaone_moe", experts.exaone_moe),
    "phimoe": ("PhimoeForCausalLM", "phimoe", experts.phimoe),
    "bailingmoe": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", experts.bailing_moe),
    "bailingmoe2": ("Glm4MoeForCausalLM", "glm4_moe", experts.bailing_moe2),
    "mimo2": ("MiMoV2FlashForCausalLM", "mimo_v2_flash", experts.mimo2),
    "mistral4": ("Mistral4ForCausalLM", "mistral4", mla.mistral4),
    "minicpm3": ("MiniCPM3ForCausalLM", "minicpm3", mla.minicpm3),
    "pangu-embedded": ("LlamaForCausalLM", "llama", _llama),
    "paddleocr": ("LlamaForCausalLM", "llama", _llama),
    "olmoe": ("OlmoeForCausalLM", "olmoe", experts.olmoe),
    "minicpm": ("GraniteForCausalLM", "granite", _minicpm),
    "granite": ("GraniteForCausalLM", "granite", granite),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _smollm3),
    "arcee": ("ArceeForCausalLM", "arcee", _arcee),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss", _seed_oss),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5", with_head_dim),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", with_head_dim),
    "gemma": ("GemmaForCausalLM", "gemma", gemma.gemma),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", gemma.gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", gemma.gemma3),
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
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _olmo2),
    "command-r": ("CohereForCausalLM", "cohere", _cohere),
    "cohere2": ("Cohere2ForCausalLM", "cohere2", _cohere2),
    "glm4": ("Glm4ForCausalLM", "glm4", _glm),
    "chatglm": ("GlmForCausalLM", "glm", _glm),
    "exaone4": ("Exaone4ForCausalLM", "exaone4", _exaone4),
    "nemotron": ("NemotronForCausalLM", "nemotron", _nemotron),
    "apertus": ("ApertusForCausalLM", "apertus", _apertus),
    "jais2": ("Jais2ForCausalLM", "jais2", _jais2),
    "mistral3": ("Ministral3ForCausalLM", "ministral3", _mistral3),
    "bitnet": ("BitNetForCausalLM", "bitnet", _bitnet),
    "gemma3n": ("Gemma3nForCausalLM", "gemma3n_text", gemma.gemma3n),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text", gemma.gemma4),
}

_CONFIGS |= {
    "bert": ("BertModel", "bert", encoders.bert),
    "nomic-bert": ("NomicBertModel", "nomic_bert", encoders.nomic_bert),
    "jina-bert-v2": ("JinaBertModel", "bert", encoders.jina_bert),
    "jina-bert-v3": ("XLMRobertaModel", "xlm-roberta", encoders.jina_roberta),
    "eurobert": ("EuroBertModel", "eurobert", encoders.euro_bert),
    "modern-bert": ("ModernBertModel", "modernbert", encoders.modern_bert),
    "gemma-embedding": ("Gemma3TextModel", "gemma3_text", gemma.gemma_embedding),
    "llama-embed": ("LlamaBidirectionalModel", "llama_bidirec", _llama),
}

# Known ones without a model here.
_REFUSED = {
    **dict.fromkeys(
        (
            *("arwkv7", "falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2"),
            *("nemotron_h", "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next", "rwkv6", "rwkv6qwen2"),
            "rwkv7",
        ),
        "it has a recurrent state (state-space or linear attention, or convolutions)",
    ),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), "it fills in masked tokens, and does not generate"),
    **dict.fromkeys(("clip", "wavtokenizer-dec"), "it is a part of a model, for images or sound"),
    **dict.fromkeys(("t5", "t5encoder"), "load the model's Hugging Face checkpoint"),
    "deci": "its layers have heads and widths of their own",
    "glm-dsa": "it chooses the tokens that it attends to",
    "llama4": "it attends in chunks",
    "nomic-bert-moe": "encoders with experts are not implemented",
}

# GGUF's name: the name in config.json's architectures, of most files of that name.
ARCHITECTURES = {name: architecture for name, (architecture, _, _) in _CONFIGS.items()}
