"""<|tool_call|>[{"name": ..., "arguments": {...}}, ...], as Granite 3 writes it; <function_call>{...}."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class GraniteToolParser(ToolParser):
    """See ToolParser."""

    names = ("granite", "granite-20b-fc")
    begins = ("<|tool_call|>", "<tool_call>", "<function_call>")
    template_marks = ("<|tool_call|>", "granite")
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "<|tool_call|>[", "]")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from json_calls(reader, calls)
        yield from reader.skip_end("</tool_call>")
