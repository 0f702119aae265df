"""Requests and answers of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from vllm.server.protocol.base import (
    REFUSED_FIELDS,
    UNREAD,
    UNREAD_TEXT,
    Object,
    PictureOptions,
    RequestModel,
    ResponseModel,
    TokenId,
)
from vllm.server.protocol.generation import Messages
from vllm.utils.checks import MAX_LIST_LENGTH

MAX_TEXT_BYTES = 2**20
"""Longest text to tokenise, in bytes of UTF-8: a character may take four times as many tokens as another."""


class TokenizeRequest(RequestModel):
    """POST /tokenize"""

    TASK: ClassVar[str | None] = None
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        name: REFUSED_FIELDS[name] for name in ("tools", "documents", "media_io_kwargs")
    }
    ONE_OF: ClassVar[tuple[str, ...]] = ("prompt", "messages")

    model: str | None = Field(None, description="One of the names in /v1/models; the server has only one model.")
    prompt: Annotated[str, Field(max_length=MAX_TEXT_BYTES), UNREAD_TEXT] | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="A conversation, as in /v1/chat/completions.")
    add_special_tokens: bool | None = Field(
        None, description="Add what the tokenizer puts around a text. Left out: true with prompt, false with messages."
    )
    return_token_strs: bool | None = Field(None, description="Add the tokens' texts.")
    chat_template: str | None = Field(None, description="A Jinja template in place of the model's own.")
    chat_template_kwargs: Object | None = Field(None, description="Further variables of the template.")
    add_generation_prompt: bool | None = Field(None, description="End with the beginning of an answer; on if left out.")
    continue_final_message: bool | None = Field(None, description="Leave the last message open.")
    mm_processor_kwargs: PictureOptions = None


class TokenizeResponse(ResponseModel):
    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Longest sequence of the model, in tokens.")
    tokens: list[int]
    token_strs: list[str] | None = Field(
        description="Each token as the vocabulary spells it, where a leading space may be written Ġ or ▁; an empty "
        "text for an id without a token."
    )
    token_texts: list[str] | None = Field(
        description="Each token's text by itself; what is no whole character is the replacement character."
    )


class DetokenizeRequest(RequestModel):
    """POST /detokenize"""

    TASK: ClassVar[str | None] = None

    model: str | None = Field(None, description="One of the names in /v1/models; the server has only one model.")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_LIST_LENGTH), UNREAD]


class DetokenizeResponse(ResponseModel):
    prompt: str = Field(description="The tokens' text, special tokens included.")


class TokenizerInfo(ResponseModel):
    model: str
    vocab_size: int = Field(description="Number of tokens, added ones included.")
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None = Field(description="The Jinja template that conversations are written by.")
