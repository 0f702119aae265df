"""How models mark what they write for themselves: a file a format, found by the names that its class has."""

from vllm.answers.reasoning.abs_reasoning_parsers import ReasoningParser, ReasoningParserManager

__all__ = ["ReasoningParser", "ReasoningParserManager"]
