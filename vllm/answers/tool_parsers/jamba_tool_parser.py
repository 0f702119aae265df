"""<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>, as Jamba and Hunyuan write it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class JambaToolParser(ToolParser):
    """Objects may also stand one a line."""

    names = ("jamba", "hunyuan_a13b", "minimax")
    begins = ("<tool_calls>",)
    template_marks = ("<tool_calls>",)
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "<tool_calls>[", "]</tool_calls>")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            yield from reader.skip_space()
            if (yield from reader.skip("</tool_calls>")):
                return
            yield from json_calls(reader, calls)
