"""<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, as Qwen3-Coder writes it, and
Seed-OSS with outer tags of its own."""

from collections.abc import Iterator
from typing import ClassVar

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, tag_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class Qwen3CoderToolParser(ToolParser):
    """The outer tags may be missing."""

    names: ClassVar[tuple[str, ...]] = ("qwen3_coder", "qwen3_xml", "step3p5", "step5", "nemotron_v3", "mimo")
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    values_on_lines: ClassVar[bool] = True
    call_text: ClassVar[CallText] = CallText(
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        "\n",
        arguments=ArgumentText("<parameter=", ">\n", "\n</parameter>\n", ">\n"),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        end = f"</{self.begins[0][1:]}"
        ends = ("</function>", end)
        tags = Tags("<parameter=", ">", "</parameter>", ends, on_lines=self.values_on_lines, may_be_open=True)
        yield from reader.skip_space()
        if marker == self.begins[0]:
            yield from reader.expect("<function=")
        name, _ = yield from reader.until(">")
        if "\n" in name:
            raise NotACall
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name.strip(), tags)
        yield from reader.skip_end(end)


class SeedOssToolParser(Qwen3CoderToolParser):
    """<seed:tool_call>; line ends around a value are the value's."""

    names = ("seed_oss",)
    begins = ("<seed:tool_call>", "<function=")
    template_marks = ("<seed:tool_call>",)
    values_on_lines = False
    call_text = CallText(
        "<seed:tool_call>\n<function=",
        ">\n",
        "</function>\n</seed:tool_call>",
        "\n",
        arguments=ArgumentText("<parameter=", ">", "</parameter>\n", ">"),
    )
