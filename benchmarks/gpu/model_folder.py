"""Random-weight models of real shapes, for the engine (load_format="dummy") and for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bounds import ModelShape

from vllm.layers.dummy_weights import dummy_weight

_MAX_LEN = 8192
_EOS = 2


def write_config(folder: Path, shape: ModelShape) -> Path:
    """A folder with only config.json: Qwen3 of this shape, head and embedding tied."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        **vars(shape),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": _MAX_LEN,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": _EOS,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def load_in_transformers(folder: Path, device: torch.device, seed: int, dtype: torch.dtype) -> Any:
    """transformers' model with the weights that the engine generates in bfloat16 from the same seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():
        weight = dummy_weight(name, tuple(parameter.shape), torch.bfloat16, device, seed)
        parameter.data = weight.to(dtype)
    # As the engine's ignore_eos: outputs have the requested length.
    model.generation_config.eos_token_id = None
    return model.to(device)
