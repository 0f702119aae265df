"""Conversations and chat templates, under upstream's older path."""

from __future__ import annotations

from typing import Any

from vllm.renderers.chat_utils import (
    ChatCompletionContentPartParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionMessageParam,
    ChatTemplateConfig,
    ChatTemplateContentFormat,
    ChatTemplateContentFormatOption,
    ConversationMessage,
    CustomChatCompletionMessageParam,
    load_chat_template,
    make_tool_call_id,
    parse_chat_messages,
    parse_chat_messages_async,
    validate_chat_template,
)
from vllm.renderers.hf import (
    resolve_chat_template,
    resolve_chat_template_content_format,
    safe_apply_chat_template,
)


def resolve_hf_chat_template(
    tokenizer: Any,
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: Any = None,
    trust_remote_code: bool | None = None,
) -> str | None:
    """`vllm.renderers.hf.resolve_chat_template`.

    Args:
        trust_remote_code: of upstream's older versions; nothing is loaded here.
    """
    return resolve_chat_template(tokenizer, chat_template, tools, model_config=model_config)


def apply_hf_chat_template(
    tokenizer: Any,
    conversation: list[Any],
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: Any = None,
    trust_remote_code: bool | None = None,
    tokenize: bool = False,
    **kwargs: Any,
) -> str | list[int]:
    """`vllm.renderers.hf.safe_apply_chat_template`, which gives a text unless told otherwise."""
    return safe_apply_chat_template(
        model_config, tokenizer, conversation, tools=tools, chat_template=chat_template, tokenize=tokenize, **kwargs
    )


__all__ = [
    "ChatCompletionContentPartParam",
    "ChatCompletionContentPartTextParam",
    "ChatCompletionMessageParam",
    "ChatTemplateConfig",
    "ChatTemplateContentFormat",
    "ChatTemplateContentFormatOption",
    "ConversationMessage",
    "CustomChatCompletionMessageParam",
    "apply_hf_chat_template",
    "load_chat_template",
    "make_tool_call_id",
    "parse_chat_messages",
    "parse_chat_messages_async",
    "resolve_chat_template",
    "resolve_chat_template_content_format",
    "resolve_hf_chat_template",
    "safe_apply_chat_template",
    "validate_chat_template",
]
