"""Thoughts before an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.config.unserved import UnservedConfig


@dataclass
class ReasoningConfig(UnservedConfig):
    """Upstream's settings of a model's reasoning: its start and its end."""

    instead: ClassVar[str] = "thoughts are not parted from answers; the text holds both"

    reasoning_parser: str = ""
    reasoning_start_str: str = ""
    reasoning_end_str: str = ""

    @property
    def enabled(self) -> bool:
        """Whether the start and the end are set."""
        return bool(self.reasoning_start_str and self.reasoning_end_str)
