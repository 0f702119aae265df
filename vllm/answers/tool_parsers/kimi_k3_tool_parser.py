"""Calls of Kimi K3: <|open|>call tool="name" index="1"<|sep|> in <|open|>tools<|sep|>, and in each call
<|open|>argument key="key" type="string"<|sep|>value<|close|>argument<|sep|>."""

import html
import re
from collections.abc import Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.reasoning.marked_reasoning_parsers import KimiK3ReasoningParser
from vllm.answers.syntax.call_text import ANY_NUMBER, ANY_WORD, ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, tag_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_SECTION, _SECTION_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_CALL, _CALL_END = "<|open|>call ", "<|close|>call<|sep|>"
_ARGUMENT, _ARGUMENT_END = "<|open|>argument key=", "<|close|>argument<|sep|>"
_TOOL = re.compile(r'\btool="([^"]*)"')
_TAGS = Tags(_ARGUMENT, "<|sep|>", _ARGUMENT_END, (_CALL_END,), quoted=True, text_sign='type="string"', is_escaped=True)


class KimiK3ToolParser(ToolParser):
    """See ToolParser."""

    names = ("kimi_k3",)
    begins = (_SECTION,)
    frames = KimiK3ReasoningParser.frames
    template_marks = ("<|open|>", "<|close|>", "<|sep|>")
    call_text = CallText(
        f'{_CALL}tool="',
        f'" index="{ANY_NUMBER}"<|sep|>',
        _CALL_END,
        first=_SECTION,
        last=_SECTION_END,
        arguments=ArgumentText(f'{_ARGUMENT}"', f'" type="{ANY_WORD}"<|sep|>', _ARGUMENT_END, '" type="string"<|sep|>'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while (yield from reader.close(_CALL, _SECTION_END)) == _CALL:
            attributes, _ = yield from reader.until("<|sep|>")
            found = _TOOL.search(attributes)
            if found is None or "<|" in attributes:
                raise NotACall
            name = html.unescape(found[1])
            yield calls.start(name)
            yield from tag_arguments(reader, calls, name, _TAGS)
