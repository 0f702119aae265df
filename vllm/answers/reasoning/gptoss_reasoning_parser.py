"""The channels of gpt-oss (vllm.answers.syntax.channels)."""

from collections.abc import Iterator

from vllm.answers.reader import Reader, Step
from vllm.answers.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.channels import CALL, CHANNEL, END, MESSAGE, RETURN, START, read_harmony


class GptOssReasoningParser(ReasoningParser):
    """Reads calls, too."""

    names = ("openai_gptoss",)
    begins = (f"{CHANNEL}analysis{MESSAGE}",)
    ends = tuple(f"{END}{START}assistant{CHANNEL}final{each}{MESSAGE}" for each in ("", " <|constrain|>json"))
    also_ends = (START, CALL, RETURN)
    ends_before_any = f"{END}{START}assistant"
    has_channels = True
    template_marks = (START, CHANNEL, MESSAGE)

    def read(self, reader: Reader, is_inside: bool | None = None) -> Iterator[Step]:
        return self.read_whole(reader)

    def read_whole(self, reader: Reader) -> Iterator[Step]:
        """Read a whole answer, with its calls."""
        return read_harmony(reader, Calls(reader))
