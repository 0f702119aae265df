"""Calls of DeepSeek between tokens of their own: V3 has the arguments in a block of code, V3.1 as they are."""

from collections.abc import Iterator
from typing import ClassVar

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekV31ToolParser(ToolParser):
    """The name before the separator, the arguments after it."""

    names = ("deepseek_v31",)
    begins = (_SECTION, _CALL)
    template_marks: ClassVar[tuple[str, ...]] = (_SECTION, _SEPARATOR)
    call_text = CallText(_CALL, _SEPARATOR, _CALL_END, "", _SECTION, _SECTION_END)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        is_in_call = marker == _CALL
        while True:
            yield from reader.skip_space()
            if not is_in_call:
                found = yield from reader.close(_CALL, _SECTION_END)
                if found == _SECTION_END:
                    return
            is_in_call = False
            yield from self.read_call(reader, calls)
            yield from reader.close(_CALL_END)

    def read_call(self, reader: Reader, calls: Calls) -> Iterator[Step]:
        """Read what stands between a call's markers."""
        name, _ = yield from reader.until(_SEPARATOR)
        yield calls.start(name)
        yield from reader.skip_space()
        yield from json_arguments(reader, calls)
        yield from calls.end()


class DeepSeekV3ToolParser(DeepSeekV31ToolParser):
    """A type before the separator, the name on the rest of the line, the arguments as a block of code."""

    names = ("deepseek_v3",)
    template_marks = (_SECTION, _SEPARATOR, "```json")
    call_text = CallText(
        f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}", "\n", _SECTION, _SECTION_END
    )

    def read_call(self, reader: Reader, calls: Calls) -> Iterator[Step]:
        yield from reader.until(_SEPARATOR)
        name, _ = yield from reader.until("\n")
        yield calls.start(name)
        yield from reader.skip_space()
        yield from reader.skip("```json", "```")
        yield from reader.skip_space()
        yield from json_arguments(reader, calls)
        yield from reader.skip_space()
        yield from reader.skip("```")
        yield from calls.end()
