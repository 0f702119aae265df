"""How models write calls of functions: a file a grammar; a class is found by its names."""

from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]
