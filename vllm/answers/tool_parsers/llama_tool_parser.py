"""{"name": ..., "parameters": {...}}, with semicolons between several, as Llama 3 writes it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_object_call
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class Llama3JsonToolParser(ToolParser):
    """Also with a text before and after. An object without parameters is none of its calls."""

    names = ("llama3_json", "llama4_json")
    begins = ("<|python_tag|>",)
    begins_at_start = ("{",)
    begins_unread = ('{"name"',)
    template_marks = ('"parameters": dictionary of argument name and its value',)
    call_text = CallText('{"name": "', '", "parameters": ', "}", "; ")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            yield from reader.skip_space()
            yield from json_object_call(reader, calls, needs_arguments=True)
            reader.mark()
            yield from reader.skip_space()
            if not (yield from reader.skip(";", ",")) and not (yield from reader.has("{")):
                reader.put_back(reader.since_mark())
                return
