"""Inputs that no model here takes, and prompts as upstream's renderers take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from vllm.exceptions import VLLMValidationError, shown

_KINDS = ("prompt", "prompt_token_ids", "prompt_embeds")


class MultiModalInput(TypedDict):
    """Tokens and media."""

    type: str
    prompt_token_ids: list[int]


class EncoderDecoderInput(TypedDict):
    """One input for each half of a model."""

    type: str
    encoder_prompt: Any
    decoder_prompt: Any


def parse_model_prompt(model_config: Any, prompt: Any) -> Mapping[str, Any]:
    """A prompt as a dict: a text's has `prompt`, that of ids `prompt_token_ids`; a dict stays as it is.

    Args:
        model_config: of a decoder or encoder, as all models here are; nothing of it is read.

    Raises:
        VLLMValidationError: it is none of these, or a dict that has none of the two, nor `prompt_embeds`.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping) and any(kind in prompt for kind in _KINDS):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and all(type(each) is int for each in prompt):
        return {"prompt_token_ids": list(prompt)}
    raise VLLMValidationError(
        f"prompt must be a text, a list of token ids or a dict with one of {', '.join(_KINDS)}; got {shown(prompt)}",
        "prompt",
        prompt,
    )
