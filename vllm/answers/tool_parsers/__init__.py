"""How models write calls of functions: a file a format, found by the names that its class has."""

from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]
