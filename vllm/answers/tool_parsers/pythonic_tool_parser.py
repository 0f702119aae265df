"""[name(argument=value), ...] as the whole answer: Llama 3.2, Llama 4 and ToolACE."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import PYTHON_ARGUMENTS, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.python_calls import python_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class PythonicToolParser(ToolParser):
    """See ToolParser."""

    names = ("pythonic",)
    begins_at_start = ("[",)
    call_text = CallText("", "(", ")", ", ", "[", "]", PYTHON_ARGUMENTS)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.expect("[")
        yield from python_calls(reader, calls, "]")


class Llama4PythonicToolParser(ToolParser):
    """Also between <|python_start|> and <|python_end|>."""

    names = ("llama4_pythonic",)
    begins = ("<|python_start|>",)
    begins_at_start = ("[",)
    template_marks = ("<|python_start|>",)
    call_text = CallText("", "(", ")", ", ", "<|python_start|>[", "]<|python_end|>", PYTHON_ARGUMENTS)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        yield from reader.expect("[")
        yield from python_calls(reader, calls, "]")
        yield from reader.skip_end("<|python_end|>")
