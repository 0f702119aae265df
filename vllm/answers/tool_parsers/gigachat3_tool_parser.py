"""<|function_call|>{"name": ..., "arguments": {...}}, as GigaChat 3.1 writes it; 3 has a turn of its own for it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class GigaChat3ToolParser(ToolParser):
    """See ToolParser."""

    names = ("gigachat3",)
    begins = ("<|function_call|>", "function call<|role_sep|>\n")
    frames = ("<|message_sep|>",)
    template_marks = ("<|role_sep|>", "<|message_sep|>")
    call_text = CallText('<|function_call|>{"name": "', '", "arguments": ', "}")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from json_calls(reader, calls)
        yield from reader.skip_end("</s>")
