"""New weights of experts, by name: logits are those of a model that was loaded with them, whichever module has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import make_architecture
from layouts import needs_kernels
from models_util import hf_logits, load_model, paged_logits, random_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vllm.models.registry import resolve_model_class

PROMPTS = random_prompts(131, (5, 37))
# Single matrices of experts, with an MLP that all take; stacked ones, with biases, whose gates alternate; latents.
FAMILIES = ["qwen2_moe", "gpt_oss", "deepseek_v3"]
IMPLEMENTATIONS = ["vllm", "transformers"]

Logits = list[Tensor]


def logits(model: nn.Module, folder: Path, dtype: str = "float32") -> Logits:
    _, config = load_config(folder)
    return paged_logits(model, config, PROMPTS, 7, dtype=dtype)


def load_config(folder: Path) -> tuple[Any, Any]:
    from vllm.config.checkpoint.config import load_hf_config

    config = load_hf_config(folder)
    model_class = resolve_model_class(config.architectures)
    return model_class, model_class.resolve_config(config)


def load(folder: Path, implementation: str, **fields: Any) -> nn.Module:
    return load_model(folder, max_model_len=128, model_impl=implementation, **fields)[0]


def assert_equal(ours: Logits, others: Logits) -> None:
    for got, want in zip(ours, others, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def expert_names(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name in tensors if ".experts." in name and ".shared" not in name]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_all_tensors_in_any_number_of_calls(name: str, implementation: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_architecture(name, old)
    model = make_architecture(name, new, seed=1)
    tensors = load_file(new / "model.safetensors")
    given = list(tensors.items())
    for size in (len(given), 7):
        ours = load(old, implementation)
        before = ours.weight_updater.packing_version
        for start in range(0, len(given), size):
            # A trainer's buffer, which holds the next tensors afterwards.
            call = [(key, tensor.clone()) for key, tensor in reversed(given)][start : start + size]
            ours.load_weights(call)
            for _, tensor in call:
                tensor.fill_(torch.nan)
        ours.weight_updater.complete()
        assert ours.weight_updater.packing_version > before
        for got, want in zip(logits(ours, old), hf_logits(model, PROMPTS), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_kernels)])
@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "vllm") for name in FAMILIES), ("gpt_oss", "transformers")]
)
def test_one_tensor_changes_alone(name: str, implementation: str, dtype: str, tmp_path: Path) -> None:
    """One matrix of one expert, or of all: what it is packed with keeps its values, to the bit."""
    old, mixed = tmp_path / "old", tmp_path / "mixed"
    make_architecture(name, old)
    tensors = load_file(old / "model.safetensors")
    kinds = {key.rpartition("experts.")[2].lstrip("0123456789."): key for key in expert_names(tensors)}
    ours = load(old, implementation, dtype=dtype)
    for key in kinds.values():
        tensors[key] = tensors[key] * 1.25
        ours.load_weights([(key, tensors[key])])
        ours.weight_updater.complete()
    mixed.mkdir()
    (mixed / "config.json").write_bytes((old / "config.json").read_bytes())
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    assert_equal(logits(ours, old, dtype), logits(load(mixed, implementation, dtype=dtype), mixed, dtype))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_does_not_fit_changes_nothing(name: str, implementation: str, tmp_path: Path) -> None:
    make_architecture(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ours = load(tmp_path, implementation)
    before = logits(ours, tmp_path)
    names = expert_names(tensors)
    # All that is merged into one tensor, so that transformers' module sees it.
    layer = names[0].rpartition("experts.")[0]
    whole = {key: tensors[key] for key in names if key.startswith(layer)}
    for bad in (
        {key: tensor[1:] for key, tensor in whole.items()},
        {key: tensor.int() for key, tensor in whole.items()},
    ):
        with pytest.raises(ValueError, match="experts|shape|floating"):
            ours.load_weights(bad.items())
    ours.weight_updater.complete()
    assert_equal(logits(ours, tmp_path), before)


def test_parts_of_merged_tensors_are_awaited(tmp_path: Path) -> None:
    make_architecture("qwen2_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    first = next(name for name in tensors if name.endswith("experts.0.gate_proj.weight"))
    ours = load(tmp_path, "transformers")
    before = logits(ours, tmp_path)
    ours.load_weights([(first, tensors[first])])
    with pytest.raises(ValueError, match="without 11 of the 12 tensors of model.layers.0.mlp.experts.gate_up_proj"):
        ours.weight_updater.complete()
    ours.load_weights(tensors.items())
    ours.weight_updater.complete()
    assert_equal(logits(ours, tmp_path), before)


@needs_kernels
def test_rounded_experts_change_as_a_whole(tmp_path: Path) -> None:
    make_architecture("qwen2_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    first = next(name for name in tensors if name.endswith("experts.0.gate_proj.weight"))
    ours = load(tmp_path, "vllm", quantization="int8")
    before = logits(ours, tmp_path)
    ours.load_weights([(first, tensors[first])])
    with pytest.raises(ValueError, match="a part of an expert, without 0.up_proj.weight"):
        ours.weight_updater.complete()
    ours.load_weights(tensors.items())
    ours.weight_updater.complete()
    assert_equal(logits(ours, tmp_path), before)
