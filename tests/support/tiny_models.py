"""A tiny random model of any architecture that transformers has, and transformers' own numbers for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE, MAX_POSITIONS, NUM_LAYERS = 199, 128, 4

# Fields that are set wherever a configuration has them.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "max_position_embeddings": MAX_POSITIONS,
    "sliding_window": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "word_embed_proj_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Options that are needed, also where they are None unless given.
_NEEDED = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
)
# Fields that these need besides, or instead.
_SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": NUM_LAYERS,
        "max_seq_len": MAX_POSITIONS,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 3.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4, "zero_expert_num": 1},
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "laurel_rank": 8,
        "intermediate_size": [96] * NUM_LAYERS,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_unified_text": {"global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
}


def tiny_config(model_type: str, **fields: Any) -> Any:
    """A configuration of four small layers; `fields` win over what is usual."""
    from transformers import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    usual = config_class()
    # As a dict: some configurations refuse to give what differs by layer.
    options = usual.to_dict()
    known = {
        name: value
        for name, value in _SIZES.items()
        if options.get(name) is not None or (name in _NEEDED and name in options)
    }
    if "kv_lora_rank" in known:
        # Latent attention: every query head has a key of its own, and widths of other names.
        known.pop("head_dim", None)
        known["num_key_value_heads"] = known["num_attention_heads"]
    known |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if "is_decoder" in options:
        known["is_decoder"] = True
    if isinstance(getattr(usual, "layer_types", None), list):
        kinds = list(dict.fromkeys(usual.layer_types))
        known["layer_types"] = [kinds[index % len(kinds)] for index in range(NUM_LAYERS)]
    return config_class(**(known | _SPECIAL.get(model_type, {}) | fields))


def make_tiny(model_type: str, folder: Path, seed: int = 0, **fields: Any) -> Any:
    """transformers' model in float32 with random weights, whose logits are peaked; saved in `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **fields), attn_implementation="eager")
    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.2)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reference(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' logprobs after each of the ids, float32 [length, V], without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
