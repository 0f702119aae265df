"""<|tool_call_start|>[name(argument=value), ...]<|tool_call_end|>, as LFM2 writes it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import PYTHON_ARGUMENTS, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.python_calls import python_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class Lfm2ToolParser(ToolParser):
    """See ToolParser."""

    names = ("lfm2",)
    begins = ("<|tool_call_start|>",)
    template_marks = ("<|tool_list_start|>",)
    call_text = CallText("", "(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>", PYTHON_ARGUMENTS)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        yield from reader.expect("[")
        yield from python_calls(reader, calls, "]")
        yield from reader.close("<|tool_call_end|>")
