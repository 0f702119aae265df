"""<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|> in a section, as Kimi K2 writes
it. What stands before the arguments is the call's id, too."""

from collections.abc import Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import ANY_NUMBER, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")


class KimiK2ToolParser(ToolParser):
    """See ToolParser."""

    names = ("kimi_k2",)
    begins = _SECTIONS
    template_marks = ("<|tool_calls_section_begin|>",)
    call_text = CallText(
        "<|tool_call_begin|>functions.",
        f":{ANY_NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        first=_SECTIONS[0],
        last=_SECTION_ENDS[0],
    )

    def make_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            found = yield from reader.close("<|tool_call_begin|>", *_SECTION_ENDS)
            if found in _SECTION_ENDS:
                return
            call_id, _ = yield from reader.until("<|tool_call_argument_begin|>")
            call_id = call_id.strip()
            if "<|" in call_id:
                raise NotACall
            name = call_id.rpartition(":")[0] or call_id
            yield calls.start(name.removeprefix("functions."), call_id)
            yield from reader.skip_space()
            yield from json_arguments(reader, calls)
            yield from reader.close("<|tool_call_end|>")
            yield from calls.end()
