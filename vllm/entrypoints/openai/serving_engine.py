"""The former place of OpenAIServing."""

from vllm.entrypoints.openai.engine.serving import OpenAIServing

__all__ = ["OpenAIServing"]
