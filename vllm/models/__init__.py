"""Model architectures."""

from vllm.models.interfaces import (
    SupportsLoRA,
    SupportsMultiModal,
    SupportsPP,
    SupportsTranscription,
    VllmModelForTextGeneration,
    supports_lora,
    supports_multimodal,
    supports_pp,
)
from vllm.models.registry import ModelRegistry

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
