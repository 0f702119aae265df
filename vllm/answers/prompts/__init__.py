"""Conversations to prompts."""

from vllm.answers.prompts.conversations import normal_messages
from vllm.answers.prompts.writer import (
    load_chat_template,
    picture_options,
    render_conversations,
    render_texts,
    written_conversations,
)

__all__ = [
    "load_chat_template",
    "normal_messages",
    "picture_options",
    "render_conversations",
    "render_texts",
    "written_conversations",
]
