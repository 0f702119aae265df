"""Calls of Step 3: <steptml:invoke name="..."><steptml:parameter name="key">value</steptml:parameter></steptml:invoke>,
each between tokens of its own, in a section."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, invoked_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_SECTION, _SECTION_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_TAGS = Tags("<steptml:parameter name=", ">", "</steptml:parameter>", ("</steptml:invoke>",), quoted=True)


class Step3ToolParser(ToolParser):
    """The type before a separator, and separators between calls, may be missing."""

    names = ("step3",)
    begins = (_SECTION,)
    template_marks = ("<steptml:invoke",)
    call_text = CallText(
        f'{_CALL}function{_SEPARATOR}<steptml:invoke name="',
        '">',
        f"</steptml:invoke>{_CALL_END}",
        first=_SECTION,
        last=_SECTION_END,
        arguments=ArgumentText('<steptml:parameter name="', '">', "</steptml:parameter>", '">'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            found = yield from reader.close(_CALL, _SEPARATOR, _SECTION_END)
            if found == _SECTION_END:
                return
            if found == _CALL:
                if (yield from reader.skip("function")):
                    yield from reader.close(_SEPARATOR)
                yield from invoked_calls(reader, calls, "<steptml:invoke name=", _CALL_END, _TAGS)
