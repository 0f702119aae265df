"""The former place of OpenAIServingCompletion."""

from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

__all__ = ["OpenAIServingCompletion"]
