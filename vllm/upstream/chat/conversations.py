"""Conversations and chat templates as callers handle them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from typing_extensions import NotRequired, Required

from vllm.answers.prompts import load_chat_template as load_template
from vllm.answers.prompts import normal_messages
from vllm.answers.prompts.content_forms import ContentForm, formed

ChatTemplateContentFormatOption = Literal["auto", "string", "openai"]
ChatTemplateContentFormat = Literal["string", "openai"]


class ChatCompletionContentPartTextParam(TypedDict):
    """A part of a message that is a text."""

    type: Required[Literal["text"]]
    text: Required[str]


ChatCompletionContentPartParam = dict[str, Any] | ChatCompletionContentPartTextParam


class CustomChatCompletionMessageParam(TypedDict, total=False):
    """A message as clients send it."""

    role: Required[str]
    content: str | list[Any] | None
    name: str
    tool_call_id: str | None
    tool_calls: list[dict[str, Any]] | None
    reasoning: str | None


ChatCompletionMessageParam = dict[str, Any] | CustomChatCompletionMessageParam


class ConversationMessage(TypedDict, total=False):
    """A message as a template takes it."""

    role: Required[str]
    content: str | list[dict[str, str]] | None
    tool_call_id: NotRequired[str | None]
    name: NotRequired[str | None]
    tool_calls: NotRequired[list[dict[str, Any]] | None]
    reasoning: NotRequired[str | None]


@dataclass
class ChatTemplateConfig:
    """How a server renders conversations."""

    chat_template: str | None = None
    chat_template_content_format: ChatTemplateContentFormatOption = "auto"
    trust_request_chat_template: bool = False
    trust_request_mm_kwargs: bool = False


def load_chat_template(chat_template: Path | str | None, *, is_literal: bool = False) -> str | None:
    """A template: the text of the file that is named, or the argument itself where it is a template already.

    Args:
        is_literal: it is a template, whatever it looks like.

    Raises:
        ValueError: neither a file nor a template (which has a brace or a line break).
    """
    if not is_literal:
        return load_template(chat_template)
    if isinstance(chat_template, Path):
        raise TypeError("a literal chat template is a string, not a path")
    return chat_template


def validate_chat_template(chat_template: Path | str | None) -> None:
    """
    Raises:
        ValueError: it is neither a file nor a template.
    """
    load_chat_template(chat_template)


def parse_chat_messages(
    messages: list[Any],
    model_config: Any,
    content_format: ChatTemplateContentFormat = "string",
    media_io_kwargs: dict[str, dict[str, Any]] | None = None,
    mm_processor_kwargs: dict[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], None, None]:
    """A conversation as templates take it.

    Args:
        model_config: not read.
        content_format: "string": content as one text; "openai": as a list of one text part.
        media_io_kwargs, mm_processor_kwargs: of media, which no message may hold.

    Returns:
        The messages; and None twice, for media and their names.

    Raises:
        VLLMValidationError: a malformed message, or one with media.
    """
    form: ContentForm = "part" if content_format == "openai" else "text"
    conversation = normal_messages(messages)
    return [{**each, "content": formed(each["content"], form)} for each in conversation], None, None


async def parse_chat_messages_async(
    messages: list[Any],
    model_config: Any,
    content_format: ChatTemplateContentFormat = "string",
    media_io_kwargs: dict[str, dict[str, Any]] | None = None,
    mm_processor_kwargs: dict[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], None, None]:
    """`parse_chat_messages`, to be awaited."""
    return parse_chat_messages(messages, model_config, content_format, media_io_kwargs, mm_processor_kwargs)


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """A new id of a tool call; of Kimi's models, one that its function and place make."""
    if id_type == "kimi_k2":
        return f"functions.{func_name}:{idx}"
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


__all__ = [
    "ChatCompletionContentPartParam",
    "ChatCompletionContentPartTextParam",
    "ChatCompletionMessageParam",
    "ChatTemplateConfig",
    "ChatTemplateContentFormat",
    "ChatTemplateContentFormatOption",
    "ConversationMessage",
    "CustomChatCompletionMessageParam",
    "load_chat_template",
    "make_tool_call_id",
    "parse_chat_messages",
    "parse_chat_messages_async",
    "validate_chat_template",
]


class ChatCompletionContentPartImageParam(TypedDict):
    """A part of a message that no model here takes."""

    type: Literal["image_url"]
    image_url: dict[str, str]


def has_non_text_content(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a message holds a part that is no text."""
    parts = (part for each in messages if isinstance(each.get("content"), list) for part in each["content"])
    return any(isinstance(part, Mapping) and part.get("type") not in _TEXT_PARTS for part in parts)


def parse_chat_message_content(message: Mapping[str, Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """The message as it is rendered.

    Raises:
        VLLMValidationError: it is none, or holds what is no text.
    """
    conversation, *_ = parse_chat_messages([dict(message)], None)
    return conversation


_TEXT_PARTS = (None, "text", "input_text", "output_text", "refusal", "thinking")
