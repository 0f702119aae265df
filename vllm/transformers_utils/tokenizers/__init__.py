"""Tokenizers that are not transformers'."""

from vllm.tokenizers.mistral import MistralTokenizer

__all__ = ["MistralTokenizer"]
