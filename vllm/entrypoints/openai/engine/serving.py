"""What upstream's endpoints have in common."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class OpenAIServing(Unserved):
    """Their base."""

    instead: ClassVar[str] = "endpoints are functions over the engine; build_app makes the application"
