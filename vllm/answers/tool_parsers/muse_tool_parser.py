"""Calls of Muse: messages to functions (vllm.answers.syntax.recipients)."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.calls import Calls, argument_schemas
from vllm.answers.syntax.recipients import MESSAGE, SECTION, START, read_messages
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class MuseToolParser(ToolParser):
    """Reads reasoning, too."""

    names = ("muse", "muse_glimmer", "musespark1x")
    begins = (START, MESSAGE)
    template_marks = (SECTION,)
    calls_follow_reasoning = False

    def read(self, reader: Reader) -> Iterator[Step]:
        return self.read_whole(reader)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer, with its reasoning."""
        return read_messages(reader, Calls(reader, argument_schemas(self.plain_tools), self.make_id))
