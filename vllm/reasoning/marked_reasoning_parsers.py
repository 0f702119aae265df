"""Reasoning between other markers."""

from collections.abc import Iterator, Sequence

from vllm.parser.events import Content, Reasoning
from vllm.parser.reader import Reader, Step
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser


class MistralReasoningParser(ReasoningParser):
    """Magistral and later."""

    names = ("mistral",)
    begins = ("[THINK]",)
    ends = ("[/THINK]",)
    template_marks = ("[THINK]",)


class Gemma4ReasoningParser(ReasoningParser):
    """A channel of its own, whose name is the first line; content may come before it, and between several."""

    names = ("gemma4", "gemma")
    begins = ("<|channel>",)
    ends = ("<channel|>",)
    also_ends = ("<|tool_call>",)
    drops = "thought\n"
    template_marks = ("<|channel>",)

    def read_content(self, reader: Reader) -> Iterator[Step]:
        """Read the rest, with further channels."""
        while (yield from reader.text_until(self.begins, lambda text: iter((Content(text),)))) is not None:
            yield from reader.skip(self.drops)
            yield from reader.text_until(self.ends, lambda text: iter((Reasoning(text),)))

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the newest turn is not within a channel; one that has none yet, if answers do not begin with one."""
        turn = self._text(input_ids).rpartition("<|turn>model\n")[2]
        begun, end = turn.rfind(self.begins[0]), turn.rfind(self.ends[0])
        return not self._is_inside if begun == end else end > begun


class GraniteReasoningParser(ReasoningParser):
    """Granite 3.2 says it in words."""

    names = ("granite",)
    begins = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")
    template_marks = ("Here is my thought process:",)


class SeedOssReasoningParser(ReasoningParser):
    """Seed-OSS."""

    names = ("seed_oss",)
    begins = ("<seed:think>",)
    ends = ("</seed:think>",)
    template_marks = ("<seed:think>",)
