"""Inputs that no model here takes."""

from __future__ import annotations

from typing import Any, TypedDict


class MultiModalInput(TypedDict):
    """Tokens and media."""

    type: str
    prompt_token_ids: list[int]


class EncoderDecoderInput(TypedDict):
    """One input for each half of a model."""

    type: str
    encoder_prompt: Any
    decoder_prompt: Any
