"""Every native architecture that transformers has, too: the fields of a random model of four layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hybrids import HYBRIDS
from mixtures import MIXTURES

VOCAB_SIZE = 131
WINDOW = 9

_USUAL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_MHA = {name: value for name, value in _USUAL.items() if name not in ("num_key_value_heads", "head_dim")}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128}
_WINDOWS = {"sliding_window": WINDOW}
_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

_LATENT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
_MSCALE = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}

# By a name of its own: transformers' model type and what differs from the usual fields.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = (
    {
        "llama": ("llama", _USUAL | {"attention_bias": True, "mlp_bias": True}),
        "llama-yarn": ("llama", _USUAL | {"rope_parameters": _YARN}),
        "mistral": ("mistral", _USUAL | _WINDOWS),
        "ministral": (
            "ministral",
            _USUAL | _WINDOWS | {"layer_types": ["full_attention", "sliding_attention"] * 2},
        ),
        "ministral3": ("ministral3", _USUAL | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}}),
        "qwen2": ("qwen2", _USUAL | _WINDOWS | {"use_sliding_window": True, "max_window_layers": 2}),
        "qwen3": ("qwen3", _USUAL),
        "opt": ("opt", {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4}),
        "phi": ("phi", _USUAL | {"partial_rotary_factor": 0.5}),
        "phi-qk-norm": ("phi", _USUAL | {"qk_layernorm": True}),
        "phi3": ("phi3", _MHA | {"num_key_value_heads": 2}),
        "phi3-longrope": (
            "phi3",
            _MHA
            | {"num_key_value_heads": 2, "original_max_position_embeddings": 64, "max_position_embeddings": 128}
            | {
                "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
                | _FACTORS
            },
        ),
        "phi3-window": ("phi3", _MHA | _WINDOWS),
        "gpt2": ("gpt2", _GPT2),
        "gpt2-by-layer": ("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
        "gpt_bigcode": ("gpt_bigcode", _GPT2),
        "gpt_bigcode-mha": ("gpt_bigcode", _GPT2 | {"multi_query": False}),
        "gptj": ("gptj", _GPT2 | {"rotary_dim": 4}),
        "codegen": ("codegen", _GPT2 | {"rotary_dim": 4}),
        "gpt_neox": ("gpt_neox", _MHA | {"rotary_pct": 0.5}),
        "gpt_neox_japanese": (
            "gpt_neox_japanese",
            {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_multiple_size": 2},
        ),
        "gpt_neox-sequential": ("gpt_neox", _MHA | {"use_parallel_residual": False}),
        "gpt_neo": (
            "gpt_neo",
            {
                "hidden_size": 32,
                "num_layers": 4,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 2]],
                "window_size": WINDOW,
                "max_position_embeddings": 128,
            },
        ),
        "falcon": (
            "falcon",
            {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_kv_heads": 2}
            | {"new_decoder_architecture": True},
        ),
        "falcon-one-norm": (
            "falcon",
            {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_kv_heads": 2}
            | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        ),
        "falcon-7b": ("falcon", {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}),
        "falcon-rw": (
            "falcon",
            {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "alibi": True, "bias": True}
            | {"multi_query": False, "parallel_attn": False},
        ),
        "stablelm": ("stablelm", _MHA | {"num_key_value_heads": 2, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
        "stablelm-12b": (
            "stablelm",
            _MHA | {"num_key_value_heads": 2, "qk_layernorm": True, "use_parallel_residual": True},
        ),
        "starcoder2": ("starcoder2", _MHA | _WINDOWS | {"num_key_value_heads": 2}),
        "olmo": ("olmo", _MHA | {"clip_qkv": 0.5}),
        "olmo2": ("olmo2", _MHA | {"num_key_value_heads": 2}),
        "olmo3": ("olmo3", _MHA | _WINDOWS | {"num_key_value_heads": 2}),
        "cohere": ("cohere", _MHA | {"num_key_value_heads": 2, "logit_scale": 0.7}),
        "cohere-qk-norm": ("cohere", _MHA | {"num_key_value_heads": 2, "use_qk_norm": True, "logit_scale": 0.7}),
        "cohere2": ("cohere2", _USUAL | _WINDOWS | {"logit_scale": 0.7}),
        "granite": (
            "granite",
            _MHA
            | {"num_key_value_heads": 2, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}
            | {"residual_multiplier": 0.5, "logits_scaling": 0.5},
        ),
        "cwm": ("cwm", _USUAL | _WINDOWS | {"rope_parameters": _LLAMA3}),
        "granite_swa": (
            "granite_swa",
            _MHA
            | _WINDOWS
            | {"num_key_value_heads": 2, "attention_multiplier": 0.2, "layer_rope_theta": [0, 100.0, 1e4, 1e4]},
        ),
        "hyperclovax": ("hyperclovax", _USUAL | {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
        "glm": ("glm", _USUAL),
        "glm4": ("glm4", _USUAL),
        "nemotron": ("nemotron", _USUAL),
        "persimmon": ("persimmon", _MHA),
        "smollm3": ("smollm3", _MHA | {"num_key_value_heads": 2}),
        "seed_oss": ("seed_oss", _USUAL),
        "exaone4": ("exaone4", _MHA | _WINDOWS | {"num_key_value_heads": 2}),
        "exaone4-full": (
            "exaone4",
            _MHA | {"num_key_value_heads": 2, "sliding_window": None, "layer_types": ["full_attention"] * 4},
        ),
        "ernie4_5": ("ernie4_5", _USUAL | {"use_bias": True}),
        "helium": ("helium", _USUAL),
        "hunyuan_v1_dense": ("hunyuan_v1_dense", _USUAL),
        "hunyuan_v1_dense-alpha": (
            "hunyuan_v1_dense",
            _USUAL | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
        ),
        "apertus": ("apertus", _MHA | {"num_key_value_heads": 2}),
        "arcee": ("arcee", _USUAL),
        "jais2": ("jais2", _USUAL),
        "nanochat": ("nanochat", _MHA | {"num_key_value_heads": 2}),
        "bitnet": ("bitnet", _MHA | {"num_key_value_heads": 2}),
        "xglm": ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4}),
        "biogpt": ("biogpt", _MHA),
        "openai-gpt": ("openai-gpt", _GPT2),
        "gemma": ("gemma", _USUAL),
        "gemma2": ("gemma2", _USUAL | _WINDOWS | {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0}),
        "gemma3": ("gemma3_text", _USUAL | _WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
        # Two layers read others' keys, one of each kind; the last layer's MLP has another width.
        "gemma3n": (
            "gemma3n_text",
            _USUAL
            | _WINDOWS
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 8}
            | {"activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0], "intermediate_size": [48, 48, 48, 40]}
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
        ),
        "gemma4": (
            "gemma4_text",
            _USUAL
            | _WINDOWS
            | {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "global_head_dim": 16,
            }
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "use_double_wide_mlp": True},
        ),
        "gemma4-values-are-keys": (
            "gemma4_text",
            _USUAL
            | _WINDOWS
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16}
            | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        ),
        "gemma4_unified": (
            "gemma4_unified_text",
            _USUAL | _WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 16},
        ),
        "vaultgemma": ("vaultgemma", _USUAL | _WINDOWS),
        "minicpm3": ("minicpm3", _LATENT | {"dim_model_base": 64}),
        "youtu": ("youtu", _LATENT | {"rope_parameters": _MSCALE, "attention_bias": True}),
        "youtu-plain-queries": ("youtu", _LATENT | {"q_lora_rank": None, "attention_bias": True}),
        "bloom": ("bloom", {"hidden_size": 32, "n_layer": 4, "n_head": 4}),
        "bloom-six-heads": ("bloom", {"hidden_size": 48, "n_layer": 4, "n_head": 6}),
        "mpt": ("mpt", {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 128}),
        "mpt-six-heads": ("mpt", {"d_model": 48, "n_layers": 4, "n_heads": 6, "max_seq_len": 128}),
    }
    | MIXTURES
    | HYBRIDS
)


# By the usual weights a token's reading follows the order of float32 sums: transformers' own are off by 2e-3.
_SEEDS = {"qwen3_5_moe": 4}


def make_architecture(name: str, folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in float32 with random weights, sharp enough that readings differ, saved to `folder`."""
    from transformers import CONFIG_MAPPING

    model_type, fields = ARCHITECTURES[name]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if "n_positions" not in fields and "max_seq_len" not in fields and model_type != "bloom":
        fields = {"max_position_embeddings": 128} | fields
    config = CONFIG_MAPPING[model_type](**(ids | {"vocab_size": VOCAB_SIZE} | fields | overrides))
    # Soft-caps are in "eager" only, which on the other hand adds Falcon's ALiBi twice.
    implementation = "sdpa" if model_type == "falcon" else "eager"
    model = generating_class(config).from_config(config, attn_implementation=implementation).float().eval()
    fill_weights(model, seed or _SEEDS.get(name, 0))
    model.save_pretrained(folder)
    return model


def generating_class(config: Any) -> Any:
    """transformers' automatic class that builds the model of `config`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForPreTraining

    # Mistral 4 is known as a part of models with images.
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForPreTraining


@torch.no_grad()
def fill_weights(model: Any, seed: int, spread: float = 0.25) -> None:
    """Random values, of matrices with standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = spread if parameter.ndim > 1 else 1.2 * spread
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if parameter.ndim == 1:
            parameter.add_(0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5 + torch.rand((), generator=generator))
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * spread)
