"""<tool_call>name<tool_sep><arg_key>key</arg_key><arg_value>value</arg_value></tool_call> in <tool_calls>, as Hunyuan 3
writes it, and Hunyuan 4 without the separator. All of a model's tags may have a suffix: <tool_calls:suffix>."""

from collections.abc import Iterator
from typing import ClassVar

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, tag_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class HYV3ToolParser(ToolParser):
    """See ToolParser."""

    names: ClassVar[tuple[str, ...]] = ("hy_v3",)
    begins = ("<tool_calls>", "<tool_calls:")
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_calls", "<tool_call", "<tool_sep", "<arg_key", "<arg_value")
    call_text: ClassVar[CallText] = CallText(
        "<tool_call>",
        "<tool_sep>\n",
        "</tool_call>\n",
        first="<tool_calls>\n",
        last="</tool_calls>",
        arguments=ArgumentText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_key>\n<arg_value>"),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        end = ">"
        if marker.endswith(":"):
            suffix, _ = yield from reader.until(">")
            end = f":{suffix}>"
        if not end[:-1].lstrip(":").replace("_", "").isalnum() and end != ">":
            raise NotACall
        tags = Tags(
            f"<arg_key{end}", f"</arg_key{end}", f"</arg_value{end}", (f"</tool_call{end}",), f"<arg_value{end}"
        )
        while (yield from reader.close(f"<tool_call{end}", f"</tool_calls{end}")) == f"<tool_call{end}":
            name, found = yield from reader.until(f"<tool_sep{end}", tags.begin, *tags.call_end)
            name = name.strip()
            if not name or any(char in name for char in '{}"<> \n'):
                raise NotACall
            if not found.startswith("<tool_sep"):
                reader.untake()
            yield calls.start(name)
            yield from tag_arguments(reader, calls, name, tags)


class HYV4ToolParser(HYV3ToolParser):
    """For the choice by template, and for grammars."""

    names = ("hy_v4",)
    template_marks = ("<tool_calls", "<tool_call", "<arg_key", "<arg_value")
    call_text = HYV3ToolParser.call_text._replace(between="\n")
