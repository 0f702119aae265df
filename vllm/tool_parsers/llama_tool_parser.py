"""{"name": ..., "parameters": {...}} as the whole answer, with semicolons between several, as Llama 3 writes it."""

from collections.abc import Iterator

from vllm.parser.calls import Calls
from vllm.parser.json_calls import json_object_call
from vllm.parser.reader import Reader, Step
from vllm.tool_parsers.abstract_tool_parser import CallText, ToolParser


class Llama3JsonToolParser(ToolParser):
    """See ToolParser."""

    names = ("llama3_json", "llama4_json")
    begins = ("<|python_tag|>",)
    begins_at_start = ("{",)
    template_marks = ('"parameters": dictionary of argument name and its value',)
    call_text = CallText('{"name": "', '", "parameters": ', "}", "; ")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            yield from reader.skip_space()
            yield from json_object_call(reader, calls)
            yield from reader.skip_space()
            if not (yield from reader.skip(";", ",")):
                found = yield from reader.has("{")
                if not found:
                    return
