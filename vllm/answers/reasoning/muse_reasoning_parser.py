"""Messages of Muse to itself (vllm.answers.syntax.recipients), and blocks of Inkling (vllm.answers.syntax.blocks)."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.answers.syntax import recipients
from vllm.answers.syntax.blocks import ENDS, THOUGHTS, read_blocks
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.recipients import MESSAGE, SECTION, read_messages


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
