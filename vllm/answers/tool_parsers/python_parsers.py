"""Calls as Python writes them: name(argument=value), ..."""

from collections.abc import Iterator
from typing import ClassVar

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import PYTHON_ARGUMENTS, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.python_calls import python_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class PythonicToolParser(ToolParser):
    """[name(argument=value), ...] as the whole answer: Llama 3.2, Llama 4 and ToolACE."""

    names = ("pythonic",)
    begins_at_start: ClassVar[tuple[str, ...]] = ("[",)
    call_text = CallText("", "(", ")", ", ", "[", "]", PYTHON_ARGUMENTS)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        yield from reader.expect("[")
        yield from python_calls(reader, calls, "]")


class Llama4PythonicToolParser(PythonicToolParser):
    """Also between <|python_start|> and <|python_end|>."""

    names = ("llama4_pythonic",)
    begins = ("<|python_start|>",)
    begins_at_start = ("[",)
    template_marks = ("<|python_start|>",)
    call_text = CallText("", "(", ")", ", ", "<|python_start|>[", "]<|python_end|>", PYTHON_ARGUMENTS)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from super().read_calls(reader, calls, marker)
        yield from reader.skip_end("<|python_end|>")


class Lfm2ToolParser(PythonicToolParser):
    """<|tool_call_start|>[name(argument=value), ...]<|tool_call_end|>, as LFM2 writes it."""

    names = ("lfm2",)
    begins = ("<|tool_call_start|>",)
    begins_at_start = ()
    template_marks = ("<|tool_list_start|>",)
    call_text = CallText("", "(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>", PYTHON_ARGUMENTS)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from super().read_calls(reader, calls, marker)
        yield from reader.close("<|tool_call_end|>")


class Olmo3PythonicToolParser(ToolParser):
    """<function_calls>name(argument=value)</function_calls>, a call a line, as OLMo 3 writes it."""

    names = ("olmo3",)
    begins = ("<function_calls>",)
    template_marks = ("<function_calls>",)
    call_text = CallText("", "(", ")", "\n", "<function_calls>\n", "\n</function_calls>", PYTHON_ARGUMENTS)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from python_calls(reader, calls, "</function_calls>")
