"""Architectures by the name that config.json gives them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from torch import nn

_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "OPTForCausalLM": ("opt", "OPTForCausalLM"),
}


def supported_architectures() -> list[str]:
    return sorted(_MODELS)


def resolve_model_class(architectures: Sequence[str]) -> type[nn.Module]:
    """The class of the first supported architecture; ValueError if there is none, which lists those that are."""
    for name in architectures:
        if name in _MODELS:
            module, class_name = _MODELS[name]
            return getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), class_name)
    given = ", ".join(architectures) or "none"
    raise ValueError(f"config.json: architectures must name one of {', '.join(supported_architectures())}, got {given}")
