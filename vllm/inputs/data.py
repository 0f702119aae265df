"""The shapes a prompt may have. Those with images are refused by name when a request brings them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    import torch

MultiModalDataDict = Mapping[str, Any]
"""Media by kind ("image", "video", "audio"): one item or a list of them."""
MultiModalUUIDDict = Mapping[str, Sequence[str | None] | str]
"""A name for each of these items."""
ModalityData = Any
"""One item of a kind, a list of them, or None."""


class MultiModalDataBuiltins(TypedDict, total=False):
    """The kinds of media that upstream knows."""

    image: Any
    video: Any
    audio: Any
    vision_chunk: Any


class _PromptOptions(TypedDict):
    """Keys that every prompt may have; `cache_salt` keeps its cached prefix from being shared with other salts."""

    multi_modal_data: NotRequired[MultiModalDataDict | None]
    media_io_kwargs: NotRequired[dict[str, dict[str, Any]] | None]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    multi_modal_uuids: NotRequired[MultiModalUUIDDict]
    cache_salt: NotRequired[str]


class TextPrompt(_PromptOptions):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids; `prompt` is the text that they stand for."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]
    prompt_token_offsets: NotRequired[list[tuple[int, int]] | None]


class EmbedsPrompt(_PromptOptions):
    """A prompt as embeddings, [num_tokens, hidden_size]. Where `prompt_is_token_ids` is true, the token's own takes the
    place of the one given; other ids, and `prompt`, are what the embeddings stand for."""

    prompt_embeds: torch.Tensor
    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[list[int]]
    prompt_is_token_ids: NotRequired[list[bool]]


class DataPrompt(_PromptOptions):
    """A prompt for a plug-in that makes one of it."""

    data: Any
    data_format: str


class ExplicitEncoderDecoderPrompt(TypedDict):
    """A prompt for each half of an encoder-decoder model."""

    encoder_prompt: str | list[int] | TextPrompt | TokensPrompt
    decoder_prompt: str | list[int] | TextPrompt | TokensPrompt | None


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


SingletonPrompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
DictPrompt = TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt
PromptType = SingletonPrompt | ExplicitEncoderDecoderPrompt
EngineInput = TokensInput | EmbedsInput
