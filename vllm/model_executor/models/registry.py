"""Architectures by the name that config.json gives them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


class _ModelRegistry:
    """The architectures that can be served, as upstream's callers ask for them."""

    def get_supported_archs(self) -> AbstractSet[str]:
        """Their names in config.json."""
        return _MODELS.keys()

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Nothing, for an architecture that is served here already: ours is kept.

        Raises:
            NotImplementedError: any other.
        """
        if model_arch in _MODELS:
            return
        raise NotImplementedError(
            f"ModelRegistry.register_model({model_arch!r}): models are not taken from callers, whose layers are "
            f"written for other kernels; served are {', '.join(supported_architectures())}"
        )

    def resolve_model_cls(
        self, architectures: str | Sequence[str], model_config: Any = None
    ) -> tuple[type[nn.Module], str]:
        """The class of the first architecture that is known, and its name.

        Raises:
            ValueError: none of them is.
        """
        names = [architectures] if isinstance(architectures, str) else list(architectures)
        model_class = resolve_model_class(names)
        return model_class, next(name for name in names if name in _MODELS)

    def is_text_generation_model(self, architectures: str | Sequence[str], model_config: Any = None) -> bool:
        """Whether one of the architectures is served; all of them generate text."""
        names = [architectures] if isinstance(architectures, str) else architectures
        return any(name in _MODELS for name in names)

    def is_pooling_model(self, architectures: str | Sequence[str], model_config: Any = None) -> bool:
        """False: none is."""
        return False

    def is_multimodal_model(self, architectures: str | Sequence[str], model_config: Any = None) -> bool:
        """False: none is."""
        return False


ModelRegistry = _ModelRegistry()
