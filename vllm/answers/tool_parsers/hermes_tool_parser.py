"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write it."""

from collections.abc import Iterator
from typing import ClassVar

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class Hermes2ProToolParser(ToolParser):
    """See ToolParser."""

    names: ClassVar[tuple[str, ...]] = ("hermes", "qwen3_json", "longcat", "granite4")
    begins = ("<tool_call>", "<longcat_tool_call>")
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    call_text = CallText('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from json_calls(reader, calls)
        yield from reader.close("</" + marker[1:])
