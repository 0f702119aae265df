"""<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>: Command."""

from collections.abc import Iterator
from typing import ClassVar

from vllm.answers.reader import Reader, Step
from vllm.answers.reasoning.marked_reasoning_parsers import CohereCommandReasoningParser
from vllm.answers.syntax.call_text import ANY_NUMBER, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class CohereCommand3ToolParser(ToolParser):
    """See ToolParser."""

    names: ClassVar[tuple[str, ...]] = ("cohere_command3",)
    begins = ("<|START_ACTION|>",)
    frames = CohereCommandReasoningParser.frames
    template_marks: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>",)
    call_text = CallText(
        f'{{"tool_call_id": "{ANY_NUMBER}", "tool_name": "',
        '", "parameters": ',
        "}",
        ",\n    ",
        "<|START_ACTION|>[\n    ",
        "\n]<|END_ACTION|>",
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from json_calls(reader, calls)
        yield from reader.close("<|END_ACTION|>")


class CohereCommand4ToolParser(CohereCommand3ToolParser):
    """For the choice by template."""

    names = ("cohere_command4",)
    template_marks = ("<|START_ACTION|>", "<|START_TEXT|>")
