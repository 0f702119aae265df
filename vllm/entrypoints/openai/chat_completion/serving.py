"""Chat completions, as upstream's class."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class OpenAIServingChat(Unserved):
    """Chat completions."""

    instead: ClassVar[str] = "endpoints are functions over the engine; build_app makes the application"
