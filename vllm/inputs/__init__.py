"""Prompt types."""

from vllm.inputs.data import (
    DataPrompt,
    DictPrompt,
    EmbedsPrompt,
    EngineInput,
    ExplicitEncoderDecoderPrompt,
    ModalityData,
    MultiModalDataBuiltins,
    MultiModalDataDict,
    MultiModalUUIDDict,
    PromptType,
    SingletonPrompt,
    TextPrompt,
    TokensInput,
    TokensPrompt,
    tokens_input,
)

__all__ = [
    "DataPrompt",
    "DictPrompt",
    "EmbedsPrompt",
    "EngineInput",
    "ExplicitEncoderDecoderPrompt",
    "ModalityData",
    "MultiModalDataBuiltins",
    "MultiModalDataDict",
    "MultiModalUUIDDict",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensInput",
    "TokensPrompt",
    "tokens_input",
]
