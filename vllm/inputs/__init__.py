"""Prompt types."""

from vllm.inputs.data import (
    DataPrompt,
    DictPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    MultiModalDataDict,
    MultiModalUUIDDict,
    PromptType,
    SingletonPrompt,
    TextPrompt,
    TokensPrompt,
)

__all__ = [
    "DataPrompt",
    "DictPrompt",
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "MultiModalDataDict",
    "MultiModalUUIDDict",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
]
