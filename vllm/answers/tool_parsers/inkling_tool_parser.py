"""Calls of Inkling: blocks with {"name": ..., "args": {...}} (vllm.answers.syntax.blocks)."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.blocks import CALL, END, START, read_blocks
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class InklingEngineToolParser(ToolParser):
    """Reads reasoning, too."""

    names = ("inkling",)
    begins = (CALL,)
    template_marks = (CALL,)
    calls_follow_reasoning = False
    call_text = CallText(f'{CALL}{{"name": "', '", "args": ', f"}}{END}", START)

    def read(self, reader: Reader) -> Iterator[Step]:
        return self.read_whole(reader)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer, with its reasoning."""
        return read_blocks(reader, Calls(reader, make_id=self.make_id))
