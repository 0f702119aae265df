"""[{"name": ..., "arguments": {...}}, ...] as the answer, in a block of code or after a marker, as xLAM writes it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_ENDS = {"```json": "```", "```": "```", "<tool_call>": "</tool_call>"}


class XLAMToolParser(ToolParser):
    """See ToolParser."""

    names = ("xlam",)
    begins = ("[TOOL_CALLS]", *_ENDS)
    begins_at_start = ("[",)
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "[", "]")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from json_calls(reader, calls)
        if marker in _ENDS:
            yield from reader.close(_ENDS[marker])
