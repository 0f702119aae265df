"""The former place of what a server calls its models."""

from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels

__all__ = ["BaseModelPath", "LoRAModulePath", "OpenAIServingModels"]
