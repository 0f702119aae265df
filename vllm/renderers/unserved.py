"""Upstream's classes that make prompts: here they are functions."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.utils.unserved import Unserved, refuse

_FUNCTIONS = "rendering has no class of its own: use LLM.chat, the server's /tokenize, or safe_apply_chat_template"


class BaseRenderer(Unserved):
    """Makes prompts."""

    instead: ClassVar[str] = _FUNCTIONS


class HfRenderer(BaseRenderer):
    """Makes prompts by transformers' templates."""


class ChatParams(Unserved):
    """How a conversation is rendered."""

    instead: ClassVar[str] = _FUNCTIONS


class TokenizeParams(Unserved):
    """How a text is tokenised."""

    instead: ClassVar[str] = _FUNCTIONS


def renderer_from_config(config: Any, **kwargs: Any) -> BaseRenderer:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("renderer_from_config", _FUNCTIONS)
