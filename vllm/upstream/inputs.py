"""Inputs that no model here takes, and prompts as upstream's renderers take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from typing_extensions import NotRequired

from vllm.exceptions import VLLMValidationError, shown

if TYPE_CHECKING:
    import torch

ModalityData = Any
"""One item of a kind, a list of them, or None."""


class MultiModalDataBuiltins(TypedDict, total=False):
    """The kinds of media that upstream knows."""

    image: Any
    video: Any
    audio: Any
    vision_chunk: Any


class TokensInput(TypedDict):
    """A prompt that is tokenised, as a renderer hands it on."""

    type: Literal["token"]
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    prompt_token_offsets: NotRequired[list[tuple[int, int]] | None]
    arrival_time: NotRequired[float]
    cache_salt: NotRequired[str]


def tokens_input(
    prompt_token_ids: list[int], *, prompt: str | None = None, cache_salt: str | None = None
) -> TokensInput:
    """A TokensInput of these ids."""
    made: TokensInput = {"type": "token", "prompt_token_ids": prompt_token_ids}
    if prompt is not None:
        made["prompt"] = prompt
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    return made


class EmbedsInput(TypedDict):
    """A prompt as embeddings, as a renderer hands it on; `is_token_ids` is EmbedsPrompt's `prompt_is_token_ids`."""

    type: Literal["embeds"]
    prompt_embeds: torch.Tensor
    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[list[int]]
    is_token_ids: NotRequired[list[bool]]
    arrival_time: NotRequired[float]
    cache_salt: NotRequired[str]


def embeds_input(
    prompt_embeds: torch.Tensor, *, prompt: str | None = None, cache_salt: str | None = None
) -> EmbedsInput:
    """An EmbedsInput of these embeddings, [num_tokens, hidden_size]."""
    made: EmbedsInput = {"type": "embeds", "prompt_embeds": prompt_embeds}
    if prompt is not None:
        made["prompt"] = prompt
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    return made


EngineInput = TokensInput | EmbedsInput

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
