"""<ifm|tool_call>name<ifm|arg_key>key</ifm|arg_key><ifm|arg_value>value</ifm|arg_value></ifm|tool_call> in
<ifm|tool_calls>, as K2 Horizon writes it."""

from collections.abc import Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_object_call
from vllm.answers.syntax.tag_calls import Tags, tag_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_CALL, _CALL_END = "<ifm|tool_call>", "</ifm|tool_call>"
_SECTION, _SECTION_END = "<ifm|tool_calls>", "</ifm|tool_calls>"
_TAGS = Tags(
    "<ifm|arg_key>",
    "</ifm|arg_key>",
    "</ifm|arg_value>",
    (_CALL_END,),
    value_begin="<ifm|arg_value>",
    type_tags=("<ifm|arg_type>", "</ifm|arg_type>"),
)


class K2HorizonToolParser(ToolParser):
    """Arguments may have their type before the value; a call may be JSON."""

    names = ("k2_horizon",)
    begins = (_SECTION,)
    template_marks = (_SECTION,)
    call_text = CallText(
        _CALL,
        "",
        _CALL_END,
        "\n",
        _SECTION,
        _SECTION_END,
        ArgumentText(
            "<ifm|arg_key>", "</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>", "</ifm|arg_key><ifm|arg_value>"
        ),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while (yield from reader.close(_CALL, _SECTION_END)) == _CALL:
            yield from reader.skip_space()
            if (yield from reader.has("{")):
                yield from json_object_call(reader, calls)
                yield from reader.close(_CALL_END)
                continue
            name, _ = yield from reader.until("<ifm|arg_key>", _CALL_END)
            name = name.strip()
            if not name or any(char in name for char in '{}"<> \n'):
                raise NotACall
            reader.untake()
            yield calls.start(name)
            yield from tag_arguments(reader, calls, name, _TAGS)
