"""Bodies of Anthropic's API."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class AnthropicMessagesRequest(Unserved):
    """A request."""

    instead: ClassVar[str] = "Anthropic's API is not served; /v1/chat/completions is"
