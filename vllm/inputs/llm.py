"""The prompts of `LLM`, under upstream's present path."""

from vllm.inputs.data import (
    DataPrompt,
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    ModalityData,
    MultiModalDataBuiltins,
    MultiModalDataDict,
    MultiModalUUIDDict,
    PromptType,
    SingletonPrompt,
    TextPrompt,
    TokensPrompt,
)

__all__ = [
    "DataPrompt",
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "ModalityData",
    "MultiModalDataBuiltins",
    "MultiModalDataDict",
    "MultiModalUUIDDict",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
]
