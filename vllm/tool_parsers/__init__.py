"""Calls of tools in answers: they are not read here, and who asks for that is told so."""

from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]
