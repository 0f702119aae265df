"""Reasoning that is messages of an answer in parts, which has its calls in them, too."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.answers.syntax import blocks, recipients
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.channels import CALL, CHANNEL, END, MESSAGE, RETURN, START, read_harmony


class MessageReasoningParser(ReasoningParser):
    """Reads calls, too."""

    has_channels = True

    def read(self, reader: Reader, is_inside: bool | None = None) -> Iterator[Step]:
        return self.read_whole(reader)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer, with its calls."""
        raise NotImplementedError


class GptOssReasoningParser(MessageReasoningParser):
    """The channels of gpt-oss (vllm.answers.syntax.channels)."""

    names = ("openai_gptoss",)
    begins = (f"{CHANNEL}analysis{MESSAGE}",)
    ends = tuple(f"{END}{START}assistant{CHANNEL}final{each}{MESSAGE}" for each in ("", " <|constrain|>json"))
    also_ends = (START, CALL, RETURN)
    ends_before_any = f"{END}{START}assistant"
    template_marks = (START, CHANNEL, MESSAGE)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        return read_harmony(reader, Calls(reader))


class MuseReasoningParser(MessageReasoningParser):
    """Messages of Muse to itself (vllm.answers.syntax.recipients)."""

    names = ("muse", "muse_glimmer", "musespark1x")
    begins = (f"to=self{recipients.MESSAGE}",)
    ends = recipients.ENDS[:1]
    also_ends = (*recipients.ENDS[1:], recipients.MESSAGE)
    template_marks = (recipients.SECTION,)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        return recipients.read_messages(reader, Calls(reader))


class InklingReasoningParser(MessageReasoningParser):
    """Blocks of Inkling (vllm.answers.syntax.blocks)."""

    names = ("inkling",)
    begins = (blocks.THOUGHTS,)
    ends = blocks.ENDS[:1]
    also_ends = blocks.ENDS[1:]
    template_marks = (blocks.THOUGHTS,)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        return blocks.read_blocks(reader, Calls(reader))
