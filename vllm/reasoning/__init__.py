"""Thoughts before an answer: they are not parted from it here, and who asks for that is told so."""

from vllm.reasoning.abs_reasoning_parsers import ReasoningParser, ReasoningParserManager

__all__ = ["ReasoningParser", "ReasoningParserManager"]
