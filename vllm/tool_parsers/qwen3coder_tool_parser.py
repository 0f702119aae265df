"""<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, as Qwen3-Coder writes it."""

from collections.abc import Iterator

from vllm.parser.calls import Calls
from vllm.parser.reader import NotACall, Reader, Step
from vllm.parser.tag_calls import Tags, tag_arguments
from vllm.tool_parsers.abstract_tool_parser import ArgumentText, CallText, ToolParser

_TAGS = Tags("<parameter=", ">", "</parameter>", ("</function>", "</tool_call>"), on_lines=True)


class Qwen3CoderToolParser(ToolParser):
    """The outer tags may be missing."""

    names = ("qwen3_coder", "qwen3_xml", "step3p5", "nemotron_v3")
    begins = ("<tool_call>", "<function=")
    template_marks = ("<tool_call>", "<function=")
    call_text = CallText(
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        "\n",
        arguments=ArgumentText("<parameter=", ">\n", "\n</parameter>\n", ">\n"),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        if marker == "<tool_call>":
            yield from reader.expect("<function=")
        name, _ = yield from reader.until(">")
        if "\n" in name:
            raise NotACall
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name.strip(), _TAGS)
        yield from reader.skip_end("</tool_call>")
