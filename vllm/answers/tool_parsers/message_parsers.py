"""Calls that are messages of an answer in parts, which has its reasoning in them, too."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.syntax import blocks, channels, recipients
from vllm.answers.syntax.call_text import CallText
from vllm.answers.syntax.calls import Calls, argument_schemas
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class MessageToolParser(ToolParser):
    """Reads reasoning, too."""

    calls_follow_reasoning = False

    def read(self, reader: Reader) -> Iterator[Step]:
        return self.read_whole(reader)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer, with its reasoning."""
        raise NotImplementedError


class OpenAIToolParser(MessageToolParser):
    """Calls of gpt-oss: messages to functions (vllm.answers.syntax.channels)."""

    names = ("openai",)
    begins = (channels.START, channels.CHANNEL)
    template_marks = (channels.START, channels.CHANNEL, channels.MESSAGE)
    has_channels = True
    call_text = CallText(
        f"{channels.CHANNEL}commentary to=functions.", f" <|constrain|>json{channels.MESSAGE}", channels.CALL
    )

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        return channels.read_harmony(reader, Calls(reader, make_id=self.make_id))


class MuseToolParser(MessageToolParser):
    """Calls of Muse: messages to functions (vllm.answers.syntax.recipients)."""

    names = ("muse", "muse_glimmer", "musespark1x")
    begins = (recipients.START, recipients.MESSAGE)
    template_marks = (recipients.SECTION,)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        return recipients.read_messages(reader, Calls(reader, argument_schemas(self.plain_tools), self.make_id))


class InklingEngineToolParser(MessageToolParser):
    """Calls of Inkling: blocks with {"name": ..., "args": {...}} (vllm.answers.syntax.blocks)."""

    names = ("inkling",)
    begins = (blocks.CALL,)
    template_marks = (blocks.CALL,)
    call_text = CallText(f'{blocks.CALL}{{"name": "', '", "args": ', f"}}{blocks.END}", blocks.START)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        return blocks.read_blocks(reader, Calls(reader, make_id=self.make_id))
