"""functools[{"name": ..., "arguments": {...}}, ...], as Phi-4 mini writes it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class Phi4MiniJsonToolParser(ToolParser):
    """Also between <|tool_call|> and <|/tool_call|>."""

    names = ("phi4_mini_json",)
    begins = ("functools", "<|tool_call|>")
    template_marks = ("<|tool|>", "<|/tool|>")
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "functools[", "]")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from json_calls(reader, calls)
        if marker != "functools":
            yield from reader.close("<|/tool_call|>")
