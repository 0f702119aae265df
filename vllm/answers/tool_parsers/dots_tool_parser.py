"""<invoke name="..."><parameter name="key">value</parameter></invoke> in <dots_function_call>, as Dots writes it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.syntax.tag_calls import Tags, invoked_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_END = "</dots_function_call>"
_TAGS = Tags("<parameter name=", ">", "</parameter>", ("</invoke>",), quoted=True)


class DotsToolParser(ToolParser):
    """Also with JSON in it."""

    names = ("dots",)
    begins = ("<dots_function_call>",)
    template_marks = ("<dots_function_call>",)
    call_text = CallText(
        '<invoke name="',
        '">',
        "</invoke>",
        first="<dots_function_call>",
        last=_END,
        arguments=ArgumentText('<parameter name="', '">', "</parameter>", '">'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        if (yield from reader.has("{", "[")):
            yield from json_calls(reader, calls)
            yield from reader.close(_END)
        else:
            yield from invoked_calls(reader, calls, "<invoke name=", _END, _TAGS)
