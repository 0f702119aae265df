"""<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>, as InternLM 2 and 2.5 write it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class Internlm2ToolParser(ToolParser):
    """See ToolParser."""

    names = ("internlm",)
    begins = ("<|action_start|>",)
    template_marks = ("<|action_start|>", "<|plugin|>")
    call_text = CallText('<|action_start|><|plugin|>{"name": "', '", "parameters": ', "}<|action_end|>")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        yield from reader.expect("<|plugin|>")
        yield from json_calls(reader, calls)
        yield from reader.close("<|action_end|>")
