"""Calls of gpt-oss: messages to functions (vllm.answers.syntax.channels)."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.channels import CALL, CHANNEL, MESSAGE, START, read_harmony
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class OpenAIToolParser(ToolParser):
    """Reads reasoning, too."""

    names = ("openai",)
    begins = (START, CHANNEL)
    template_marks = (START, CHANNEL, MESSAGE)
    calls_follow_reasoning = False
    has_channels = True
    call_text = CallText(f"{CHANNEL}commentary to=functions.", f" <|constrain|>json{MESSAGE}", CALL)

    def read(self, reader: Reader) -> Iterator[Step]:
        return self.read_whole(reader)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer, with its reasoning."""
        return read_harmony(reader, Calls(reader, make_id=self.make_id))
