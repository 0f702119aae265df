"""[{"name": ..., "parameters": {...}}, ...]: how forced calls are written where a format's own way is no JSON, and the
way of some models."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class JsonArrayToolParser(ToolParser):
    """See ToolParser."""

    names = ("json_array",)
    begins_at_start = ("[",)
    call_text = CallText('{"name": "', '", "parameters": ', "}", ", ", "[", "]")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from json_calls(reader, calls)
