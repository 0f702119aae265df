"""Model architectures."""

from vllm.model_executor.models.interfaces import (
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
    SupportsTranscription,
    VllmModelForTextGeneration,
    supports_lora,
    supports_multimodal,
    supports_pp,
)
from vllm.model_executor.models.registry import ModelRegistry

__all__ = [
    "ModelRegistry",
    "SupportsLoRA",
    "SupportsMultiModal",
    "SupportsPP",
    "SupportsTranscription",
    "VllmModelForTextGeneration",
    "supports_lora",
    "supports_multimodal",
    "supports_pp",
]
