"""DeepSeek's markup from V3.2 on: a function in a tag, its arguments in tags that say whether they are texts."""

from collections.abc import Iterator
from typing import ClassVar

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, invoked_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


def _call_text(section: str, space: str = "") -> CallText:
    mark = f"｜DSML｜{space}"
    return CallText(
        f'<{mark}invoke name="',
        '">\n',
        f"</{mark}invoke>\n",
        first=f"<{mark}{section}>\n",
        last=f"</{mark}{section}>",
        arguments=ArgumentText(
            f'<{mark}parameter name="', '" string="false">', f"</{mark}parameter>\n", '" string="true">'
        ),
    )


class DeepSeekV32ToolParser(ToolParser):
    """The section's tags may be missing."""

    names: ClassVar[tuple[str, ...]] = ("deepseek_v32",)
    begins: ClassVar[tuple[str, ...]] = ("<｜DSML｜function_calls>",)
    begins_unread: ClassVar[tuple[str, ...]] = ("<｜DSML｜invoke name=",)
    template_marks: ClassVar[tuple[str, ...]] = ("<｜DSML｜function_calls>",)
    call_text: ClassVar[CallText] = _call_text("function_calls")
    space: ClassVar[str] = ""  # before the names of tags

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        mark = f"｜DSML｜{self.space}"
        tags = Tags(
            f"<{mark}parameter name=",
            ">",
            f"</{mark}parameter>",
            (f"</{mark}invoke>",),
            quoted=True,
            text_sign='string="true"',
        )
        yield from invoked_calls(reader, calls, f"<{mark}invoke name=", f"</{self.begins[0][1:]}", tags)


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """Another name of the section."""

    names = ("deepseek_v4",)
    begins = ("<｜DSML｜tool_calls>",)
    template_marks = ("<｜DSML｜tool_calls>",)
    call_text = _call_text("tool_calls")


class DeepSeekV41ToolParser(DeepSeekV32ToolParser):
    """A space before the names of tags."""

    names = ("deepseek_v41",)
    begins = ("<｜DSML｜ calls>",)
    begins_unread = ("<｜DSML｜ invoke name=",)
    template_marks = ("<｜DSML｜ calls>",)
    call_text = _call_text("calls", " ")
    space = " "
