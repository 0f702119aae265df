"""<invoke name="..."><parameter name="key">value</parameter></invoke> in <minimax:tool_call>: MiniMax M2."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, invoked_calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_TAGS = Tags("<parameter name=", ">", "</parameter>", ("</invoke>",), quoted=True)


class MinimaxM2ToolParser(ToolParser):
    """See ToolParser."""

    names = ("minimax_m2",)
    begins = ("<minimax:tool_call>",)
    template_marks = ("<minimax:tool_call>",)
    call_text = CallText(
        '<invoke name="',
        '">\n',
        "</invoke>\n",
        first="<minimax:tool_call>\n",
        last="</minimax:tool_call>",
        arguments=ArgumentText('<parameter name="', '">', "</parameter>\n", '">'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from invoked_calls(reader, calls, "<invoke name=", "</minimax:tool_call>", _TAGS)
