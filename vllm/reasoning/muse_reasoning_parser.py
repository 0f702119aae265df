"""Messages of Muse to itself (vllm.parser.recipients), and blocks of Inkling (vllm.parser.blocks)."""

from collections.abc import Iterator

from vllm.parser import recipients
from vllm.parser.blocks import ENDS, THOUGHTS, read_blocks
from vllm.parser.calls import Calls
from vllm.parser.reader import Reader, Step
from vllm.parser.recipients import MESSAGE, SECTION, read_messages
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser


class MuseReasoningParser(ReasoningParser):
    """Reads calls, too."""

    names = ("muse", "muse_glimmer", "musespark1x")
    begins = (f"to=self{MESSAGE}",)
    ends = recipients.ENDS[:1]
    also_ends = (*recipients.ENDS[1:], MESSAGE)
    template_marks = (SECTION,)
    has_channels = True

    def read(self, reader: Reader, is_inside: bool | None = None) -> Iterator[Step]:
        return self.read_whole(reader)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer, with its calls."""
        return read_messages(reader, Calls(reader))


class InklingReasoningParser(ReasoningParser):
    """Reads calls, too."""

    names = ("inkling",)
    begins = (THOUGHTS,)
    ends = ENDS[:1]
    also_ends = ENDS[1:]
    template_marks = (THOUGHTS,)
    has_channels = True

    def read(self, reader: Reader, is_inside: bool | None = None) -> Iterator[Step]:
        return self.read_whole(reader)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer, with its calls."""
        return read_blocks(reader, Calls(reader))
