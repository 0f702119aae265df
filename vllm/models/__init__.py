"""Model architectures."""

from vllm.models.registry import ModelRegistry

__all__ = ["ModelRegistry"]
