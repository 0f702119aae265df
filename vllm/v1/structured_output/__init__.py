"""Answers in a grammar."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class StructuredOutputManager(Unserved):
    """Keeps requests' grammars."""

    instead: ClassVar[str] = "answers follow no grammar; allowed_token_ids and logits processors rule tokens out"
