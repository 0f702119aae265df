"""Reasoning between other markers."""

from collections.abc import Iterator, Sequence

from vllm.parser.events import Content, Reasoning
from vllm.parser.frames import COHERE, KIMI_K3
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


class MiniMaxM3ReasoningParser(ReasoningParser):
    """MiniMax M3. A call ends it, too."""

    names = ("minimax_m3",)
    begins = ("<mm:think>",)
    ends = ("</mm:think>",)
    also_ends = ("]<]minimax[>[<tool_call>",)
    template_marks = ("<mm:think>",)


class K2HorizonReasoningParser(ReasoningParser):
    """K2 Horizon: a pair of tokens for each effort. Calls end it, too."""

    names = ("k2_horizon",)
    begins = ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>")
    ends = ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>")
    also_ends = ("<ifm|tool_calls>",)
    thinks = True
    template_marks = ("<ifm|think>",)


class KimiK3ReasoningParser(ReasoningParser):
    """Kimi K3; the content has markers, too."""

    names = ("kimi_k3",)
    begins = ("<|open|>think<|sep|>",)
    ends = ("<|close|>think<|sep|>",)
    frames = KIMI_K3
    thinks = True
    template_marks = ("<|open|>", "<|close|>", "<|sep|>")

    def read_reasoning(self, reader: Reader, is_inside: bool | None) -> Iterator[Step]:
        """An answer that begins with content has none."""
        if not (yield from reader.has(*self.frames)):
            yield from super().read_reasoning(reader, is_inside)


class CohereCommandReasoningParser(ReasoningParser):
    """Command A and later; the content has markers, too. Calls and content end it."""

    names = ("cohere_command3", "cohere_command4")
    begins = ("<|START_THINKING|>",)
    ends = ("<|END_THINKING|>",)
    also_ends = ("<|START_ACTION|>", "<|START_RESPONSE|>", "<|START_TEXT|>")
    frames = COHERE
    template_marks = ("<|START_THINKING|>",)


class Plamo3ReasoningParser(ReasoningParser):
    """PLaMo 3. Calls end it, too."""

    names = ("plamo3",)
    begins = ("<|plamo:begin_think:plamo|>",)
    ends = ("<|plamo:end_think:plamo|>",)
    also_ends = ("<|plamo:begin_tool_requests:plamo|>",)
    template_marks = ("plamo:", "begin_think")
