"""MiMo V2 Flash's published names of options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import make_architecture
from models_util import load_model, paged_logits, random_prompts

from vllm.models.registry import resolve_model_class


def logits(folder: Path) -> list[torch.Tensor]:
    ours, config = load_model(folder, max_model_len=128)
    config = resolve_model_class(config.architectures).resolve_config(config)
    return paged_logits(ours, config, random_prompts(131, (5, 37)))


def test_published_names_of_options(tmp_path: Path) -> None:
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    make_architecture("mimo_v2_flash", tmp_path, rope_parameters=ropes, mlp_layer_types=["dense"] + ["sparse"] * 3)
    expected = logits(tmp_path)
    path = tmp_path / "config.json"
    own = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types", "mlp_layer_types", "rms_norm_eps"):
        own.pop(name)
    own |= {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "sliding_window_size": own["sliding_window"] - 1,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 6,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_chunk_size": 128,
        "hybrid_block_size": None,
        "n_shared_experts": None,
    }
    path.write_text(json.dumps(own))
    for got, want in zip(logits(tmp_path), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    path.write_text(json.dumps(own | {"swa_num_key_value_heads": 1}))
    with pytest.raises(ValueError, match="swa_num_key_value_heads=1 is not supported: it must be 2"):
        logits(tmp_path)
