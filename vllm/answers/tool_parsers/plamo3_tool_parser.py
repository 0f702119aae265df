"""Names and arguments between tokens of their own, as PLaMo 3 writes them."""

from collections.abc import Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


def _token(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


_SECTION, _SECTION_END = _token("begin_tool_requests"), _token("end_tool_requests")
_CALL, _CALL_END = _token("begin_tool_request"), _token("end_tool_request")
_NAME, _NAME_END = _token("begin_tool_name"), _token("end_tool_name")
_ARGUMENTS, _ARGUMENTS_END = _token("begin_tool_arguments"), _token("end_tool_arguments")
_AS_JSON = "<|plamo:constrain|>json<|plamo:msg|>"


class Plamo3ToolParser(ToolParser):
    """See ToolParser."""

    names = ("plamo3",)
    begins = (_SECTION,)
    template_marks = ("plamo:", "begin_tool_request")
    call_text = CallText(
        _CALL + _NAME,
        _NAME_END + _ARGUMENTS + _AS_JSON,
        _ARGUMENTS_END + _CALL_END,
        first=_SECTION,
        last=_SECTION_END,
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while (yield from reader.close(_CALL, _SECTION_END)) == _CALL:
            yield from reader.close(_NAME)
            name, _ = yield from reader.until(_NAME_END)
            if "<|" in name:
                raise NotACall
            yield calls.start(name)
            yield from reader.close(_ARGUMENTS)
            yield from reader.skip_space()
            yield from reader.skip(_AS_JSON)
            yield from reader.skip_space()
            yield from json_arguments(reader, calls)
            yield from reader.close(_ARGUMENTS_END)
            yield from calls.end()
            yield from reader.close(_CALL_END)
