"""Inputs that no model here takes: their types, and functions that say so."""

from __future__ import annotations

from typing import Any, TypedDict

from vllm.utils.unserved import refuse

_TEXTS = "prompts are text or token ids; only text models are served"


class EmbedsInput(TypedDict):
    """Embeddings in place of tokens."""

    type: str
    prompt_embeds: Any


class MultiModalInput(TypedDict):
    """Tokens and media."""

    type: str
    prompt_token_ids: list[int]


class EncoderDecoderInput(TypedDict):
    """One input for each half of a model."""

    type: str
    encoder_prompt: Any
    decoder_prompt: Any


def embeds_input(prompt_embeds: Any, **fields: Any) -> EmbedsInput:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("embeds_input", _TEXTS)


def mm_input(prompt_token_ids: list[int], **fields: Any) -> MultiModalInput:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("mm_input", _TEXTS)


def build_enc_dec_input(encoder_input: Any, decoder_input: Any = None, **fields: Any) -> EncoderDecoderInput:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("build_enc_dec_input", _TEXTS)
