"""The shapes a prompt may have."""

from vllm.inputs.data import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
