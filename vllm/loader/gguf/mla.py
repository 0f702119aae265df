"""config.json of GGUF's models with latent attention (DeepSeek and others of its kind), from the header."""

from __future__ import annotations

from vllm.loader.gguf.config_parts import NULL, Config, modern, pick, rope_parameters
from vllm.loader.gguf.experts import ROUTED
from vllm.loader.gguf.header import GGUFHeader

_SOFTMAX, _SIGMOID = 1, 2
_MISTRAL = {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
_KIMI_EXPERTS = 384
# Published models whose headers do not tell their groups of experts: by experts, the groups and those of a token.
_GROUPS = {256: (8, 4), 160: (8, 3)}


def deepseek2(h: GGUFHeader) -> Config:
    """DeepSeek V2, or V3 (and Kimi, GLM 4.7 Flash, Youtu) where experts are chosen by sigmoids, or are none."""
    if h.get("attention.temperature_scale"):
        return mistral4(h) | _MISTRAL
    config = _deepseek(h)
    if not h.get("expert_count", 0) or h.get("expert_gating_func") == _SIGMOID:
        return config
    # DeepSeek V2 chooses experts by softmax.
    if config["norm_topk_prob"]:
        if config["n_group"] == 1:
            return mistral4(h) | _MISTRAL
        raise h.wrong("expert_weights_norm", "with groups is not supported")
    return config | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "greedy" if config["n_group"] == 1 else "group_limited_greedy",
    }


def mistral4(h: GGUFHeader) -> Config:
    """Mistral's models of DeepSeek's kind, whose queries grow with their positions."""
    config = _deepseek(h)
    if h.get("expert_gating_func", _SOFTMAX) != _SOFTMAX or not h.get("expert_count", 0):
        raise h.error(f"{h.architecture} must have experts that softmax chooses")
    rope = config["rope_parameters"]
    rope["llama_4_scaling_beta"] = h.get("attention.temperature_scale") or 0.0
    original = rope.get("original_max_position_embeddings")
    if rope["llama_4_scaling_beta"] and h.get("attention.temperature_length", original) != original:
        raise h.wrong("attention.temperature_length", f"must be rope.scaling.original_context_length={original}")
    return config | {"rope_parameters": rope}


def minicpm3(h: GGUFHeader) -> Config:
    # The scales of embeddings, layers and logits are the same in all its models: transformers' defaults.
    config = latent(h)
    config["v_head_dim"] = h.hidden // h.heads
    return config


def latent(h: GGUFHeader) -> Config:
    rotated = h.need("rope.dimension_count")
    width = h.get("attention.key_length_mla") or h.need("attention.key_length")
    return modern(h) | {
        "num_key_value_heads": h.heads,
        "q_lora_rank": h.get("attention.q_lora_rank") or NULL,
        "kv_lora_rank": h.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
    }


def _deepseek(h: GGUFHeader) -> Config:
    config = latent(h) | {
        "v_head_dim": h.get("attention.value_length_mla") or h.need("attention.value_length"),
        "rope_parameters": _rope(h),
    }
    count = h.get("expert_count", 0)
    if not count:
        config["first_k_dense_replace"] = h.layers
    else:
        config |= pick(h, ROUTED)
        groups, chosen = _GROUPS.get(count, (1, 1))
        config["n_group"] = h.get("expert_group_count") or groups
        config["topk_group"] = h.get("expert_group_used_count") or chosen
    return config


def _rope(h: GGUFHeader) -> Config:
    """The file has a tenth of the divisor's weight."""
    rope = rope_parameters(h)
    if rope["rope_type"] == "yarn" and h.get("expert_count", 0) == _KIMI_EXPERTS:
        # The first files of Kimi K2 do not tell it, whose value is not the usual one.
        rope.setdefault("beta_fast", 1.0)
    if "mscale_all_dim" not in rope:
        return rope
    weight = rope["mscale_all_dim"] * 10
    return rope | {"mscale": weight, "mscale_all_dim": weight}
