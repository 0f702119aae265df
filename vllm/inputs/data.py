"""The shapes a prompt may have. Those with images are refused by name when a request brings them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    import torch

MultiModalDataDict = Mapping[str, Any]
"""Media by kind ("image", "video", "audio"): one item or a list of them."""
MultiModalUUIDDict = Mapping[str, Sequence[str | None] | str]
"""A name for each of these items."""


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


SingletonPrompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
DictPrompt = TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt
PromptType = SingletonPrompt | ExplicitEncoderDecoderPrompt
