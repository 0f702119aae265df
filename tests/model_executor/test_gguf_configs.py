"""What a GGUF file's header says that cannot be run is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm.model_executor.model_loader.gguf_configs import hf_config
from vllm.model_executor.model_loader.gguf_weights import weights

COMMON = {
    "block_count": 4,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
}
GEMMA4 = COMMON | {
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, False, True, False],
    "attention.shared_kv_layers": 2,
    "rope.dimension_count_swa": 16,
    "feed_forward_length": [64, 64, 128, 128],
}
YARN = COMMON | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


def file(arch: str, header: dict[str, Any], *tensors: str) -> Any:
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in header.items()}
    shapes = {name: SimpleNamespace(shape=(48, 32)) for name in ("token_embd.weight", *tensors)}
    return SimpleNamespace(metadata=metadata, tensors=shapes, path=Path("m.gguf"))


@pytest.mark.parametrize(
    ("arch", "header", "tensor", "message"),
    [
        ("gemma4", GEMMA4, "blk.0.ffn_gate_inp.weight", "m.gguf has no gemma4.expert_count"),
        ("gemma4", GEMMA4 | {"rope.dimension_count_swa": 8}, "", "rope.dimension_count_swa must be .*=16, got 8"),
        ("gemma4", GEMMA4 | {"feed_forward_length": [64, 128, 64, 128]}, "", "or twice that in the last 2, got"),
        ("gemma4", GEMMA4 | {"attention.head_count_kv": [1, 1]}, "", "head_count_kv must have 4 values, got 2"),
        ("gemma3n", COMMON, "", "m.gguf has no gemma3n.activation_sparsity_scale"),
        ("mistral3", YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "", "yarn_ext_factor=0.5 is not supported"),
    ],
)
def test_refusals(arch: str, header: dict[str, Any], tensor: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_config(file(arch, header, *filter(None, [tensor])), "float32")


def test_heads_and_widths_by_layer() -> None:
    heads = {"attention.head_count_kv": [2, 1, 2, 1]}
    values = [f"blk.{layer}.attn_v.weight" for layer in (0, 2)]
    config = hf_config(file("gemma4", GEMMA4 | heads, *values), "float32")
    names = "num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim", "intermediate_size"
    assert [config[name] for name in names] == [2, 1, 16, 32, 64]
    assert config["attention_k_eq_v"] and config["use_double_wide_mlp"]


def test_yarn_is_read_of_every_architecture() -> None:
    betas = {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_attn_factor": 1.5}
    rope = hf_config(file("qwen3", YARN | betas), "float32")["rope_parameters"]
    assert rope == {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 16.0, "attention_factor": 1.5
    }  # fmt: skip


def test_windows_of_olmo2_are_olmo3s() -> None:
    assert hf_config(file("olmo2", COMMON), "float32")["architectures"] == ["Olmo2ForCausalLM"]
    config = hf_config(file("olmo2", COMMON | {"attention.sliding_window": 8}), "float32")
    assert config["architectures"] == ["Olmo3ForCausalLM"] and config["sliding_window"] == 8


def test_apertus_needs_its_activations() -> None:
    with pytest.raises(ValueError, match=r"m.gguf: xielu.alpha_p must have 4 values, got \[0.5\]"):
        given = file("apertus", COMMON)
        given.metadata["xielu.alpha_p"] = [0.5]
        list(weights(given))


def test_stacked_matrices_are_rows_of_their_blocks() -> None:
    """Gemma 3n's projections of streams, as values and as bytes."""
    stack = np.arange(3 * 32 * 32, dtype=np.float32).reshape(3, 32, 32)
    given = file("gemma3n", COMMON)
    given.tensors["altup_proj.weight"] = SimpleNamespace(shape=stack.shape)
    given.dequantize, given.blocks = lambda name: stack, lambda name: stack.reshape(96, 32)
    _, *projections = weights(given)
    assert len(projections) == 3
    for index, weight in enumerate(projections):
        assert weight.name == f"model.altup_projections.{index}.weight"
        assert np.array_equal(weight.load(given), stack[index]) and np.array_equal(weight.blocks(given), stack[index])
