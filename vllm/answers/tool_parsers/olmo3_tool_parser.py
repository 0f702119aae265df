"""<function_calls>name(argument=value)</function_calls>, a call a line, as OLMo 3 writes it."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import PYTHON_ARGUMENTS, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.python_calls import python_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class Olmo3PythonicToolParser(ToolParser):
    """See ToolParser."""

    names = ("olmo3",)
    begins = ("<function_calls>",)
    template_marks = ("<function_calls>",)
    call_text = CallText("", "(", ")", "\n", "<function_calls>\n", "\n</function_calls>", PYTHON_ARGUMENTS)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from python_calls(reader, calls, "</function_calls>")
