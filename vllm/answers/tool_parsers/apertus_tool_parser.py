"""<|tools_prefix|>[{"name": {...}}, ...]<|tools_suffix|>, as Apertus writes it: names are keys."""

from collections.abc import Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_arguments, json_value, parsed_json
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

TOOL_CALLS_PREFIX, TOOL_CALLS_SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


class ApertusToolParser(ToolParser):
    """See ToolParser."""

    names = ("apertus",)
    begins = (TOOL_CALLS_PREFIX,)
    template_marks = (TOOL_CALLS_PREFIX,)
    call_text = CallText('{"', '": ', "}", ", ", f"{TOOL_CALLS_PREFIX}[", f"]{TOOL_CALLS_SUFFIX}")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        yield from reader.expect("[")
        while True:
            found = yield from reader.close("{", "]")
            if found == "]":
                break
            yield from reader.skip_space()
            if not (yield from reader.has('"')):
                raise NotACall
            yield calls.start(parsed_json((yield from json_value(reader))))
            yield from reader.skip_space()
            yield from reader.expect(":")
            yield from reader.skip_space()
            yield from json_arguments(reader, calls)
            yield from reader.close("}")
            yield from calls.end()
            yield from reader.skip_space()
            yield from reader.skip(",")
        yield from reader.close(TOOL_CALLS_SUFFIX)
