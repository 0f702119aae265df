"""A plug-in that registers these models in every process."""

from __future__ import annotations

from vllm import ModelRegistry

MODELS = {
    "StatefulForCausalLM": "stateful",
    "BiasedForCausalLM": "biased",
    "WindowedForCausalLM": "windowed",
    "MixtureForCausalLM": "mixture",
}


def register() -> None:
    for name, module in MODELS.items():
        ModelRegistry.register_model(name, f"outside_models.{module}:{name}")
