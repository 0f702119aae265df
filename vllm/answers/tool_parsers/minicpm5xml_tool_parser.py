"""<function name="..."><param name="key">value</param></function>, as MiniCPM 5 writes it."""

from collections.abc import Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, tag_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_TAGS = Tags(
    "<param name=",
    ">",
    "</param>",
    ("</function>",),
    quoted=True,
    raw=("<![CDATA[", "]]>"),
    also_begin=("<paramname=",),
)


class MiniCPM5XMLToolParser(ToolParser):
    """A value may be a section of raw text; spaces in tags may be missing."""

    names = ("minicpm5",)
    begins = ("<function name=", "<functionname=")
    template_marks = ("<function name=", "<param name=")
    call_text = CallText(
        '<function name="',
        '">',
        "</function>",
        "\n",
        arguments=ArgumentText('<param name="', '">', "</param>", '">'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        name, _ = yield from reader.until(">")
        name = name.strip().strip("\"'")
        if "\n" in name:
            raise NotACall
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name, _TAGS)
