"""<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, as GLM 4.5 to 4.7 write it."""

from collections.abc import Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, tag_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_TAGS = Tags("<arg_key>", "</arg_key>", "</arg_value>", ("</tool_call>",), value_begin="<arg_value>")


class Glm4MoeModelToolParser(ToolParser):
    """See ToolParser."""

    names = ("glm45", "glm47", "ling3", "poolside_v1")
    begins = ("<tool_call>",)
    template_marks = ("<tool_call>", "<arg_key>")
    call_text = CallText(
        "<tool_call>",
        "\n",
        "</tool_call>",
        "\n",
        arguments=ArgumentText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_key>\n<arg_value>"),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        name, found = yield from reader.until("\n", "<arg_key>", "</tool_call>")
        if not name.strip() and found == "\n":
            name, found = yield from reader.until("\n", "<arg_key>", "</tool_call>")
        name = name.strip()
        if not name or any(char in name for char in '{}"<> '):
            raise NotACall
        reader.untake()
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name, _TAGS)
