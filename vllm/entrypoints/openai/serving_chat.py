"""The former place of OpenAIServingChat."""

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

__all__ = ["OpenAIServingChat"]
