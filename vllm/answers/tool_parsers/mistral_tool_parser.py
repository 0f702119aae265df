"""[TOOL_CALLS]name[ARGS]{...} for each call; of older models [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]."""

import random
import string
from collections.abc import Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_arguments, json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_ID_CHARACTERS = string.ascii_letters + string.digits


class MistralToolParser(ToolParser):
    """Ids of calls have nine letters and digits: templates refuse others."""

    names = ("mistral",)
    begins = ("[TOOL_CALLS]",)
    template_marks = ("[TOOL_CALLS]",)
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]")

    def make_id(self, name: str, index: int) -> str:
        return "".join(random.choices(_ID_CHARACTERS, k=9))

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        if (yield from reader.has("[{", "[ ", "[\n", "[]", "{")):
            yield from json_calls(reader, calls)
            return
        name, found = yield from reader.until("[ARGS]", "[CALL_ID]", "{", "[TOOL_CALLS]")
        call_id = None
        if found == "[CALL_ID]":
            call_id, found = yield from reader.until("[ARGS]")
        if found == "[TOOL_CALLS]" or "\n" in name.strip():
            raise NotACall
        if found == "{":
            reader.untake()
        yield calls.start(name, call_id)
        yield from reader.skip_space()
        yield from json_arguments(reader, calls)
        yield from calls.end()
