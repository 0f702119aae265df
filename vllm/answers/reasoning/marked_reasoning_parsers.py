"""Reasoning between other markers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.answers.events import Reasoning, as_content
from vllm.answers.reader import Reader, Step
from vllm.answers.reasoning.abs_reasoning_parsers import ReasoningParser


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
        while (yield from reader.text_until(self.begins, as_content)) is not None:
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
    """MiniMax M3: by `thinking_mode` where no prompt is known. A call ends it, too."""

    names = ("minimax_m3",)
    begins = ("<mm:think>",)
    ends = ("</mm:think>",)
    also_ends = ("]<]minimax[>[<tool_call>",)
    template_marks = ("<mm:think>",)

    def __init__(
        self, tokenizer: Any = None, *args: Any, chat_template_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(tokenizer, *args, chat_template_kwargs=chat_template_kwargs, **kwargs)
        if (chat_template_kwargs or {}).get("thinking_mode") == "enabled":
            self._is_inside = True

    def read_reasoning(self, reader: Reader, is_inside: bool | None) -> Iterator[Step]:
        """An end that nothing has begun is no content."""
        if not (yield from reader.skip(*self.ends)):
            yield from super().read_reasoning(reader, is_inside)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """By the text: tokens may be pieces of markers."""
        return self._is_inside is False or self._ends_in_text(input_ids)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the ids so far end it, or begin with content."""
        text = self._text(input_ids).lstrip()
        if self._is_inside or text.startswith(self.begins):
            return self._ends_in_text(input_ids)
        return bool(text) and not any(marker.startswith(text) and marker != text for marker in self.begins + self.ends)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """All of them, where there is no reasoning."""
        text = self._text(input_ids)
        has_marker = any(marker in text for marker in self.begins + self.ends)
        return super().extract_content_ids(input_ids) if has_marker or self._is_inside else input_ids


class K2HorizonReasoningParser(ReasoningParser):
    """K2 Horizon: a pair of tokens for each effort. Calls end it, too."""

    names = ("k2_horizon",)
    begins = ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>")
    ends = ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>")
    also_ends = ("<ifm|tool_calls>",)
    thinks = True
    template_marks = ("<ifm|think>",)

    def __init__(
        self, tokenizer: Any = None, *args: Any, chat_template_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """
        Raises:
            ValueError: a `reasoning_effort` that the model does not have.
        """
        super().__init__(tokenizer, *args, chat_template_kwargs=chat_template_kwargs, **kwargs)
        effort = (chat_template_kwargs or {}).get("reasoning_effort", "high")
        efforts = ("high", "medium", "low")
        if effort not in efforts:
            raise ValueError(f"Unsupported reasoning_effort {effort!r}; there are {', '.join(efforts)}")
        index = efforts.index(effort)
        self.start_token, self.end_token = self.begins[index], self.ends[index]


class KimiK3ReasoningParser(ReasoningParser):
    """Kimi K3; the content has markers, too."""

    names = ("kimi_k3",)
    begins = ("<|open|>think<|sep|>",)
    ends = ("<|close|>think<|sep|>",)
    frames = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    thinks = True
    template_marks = ("<|open|>", "<|close|>", "<|sep|>")
    has_channels = True

    def read_reasoning(self, reader: Reader, is_inside: bool | None) -> Iterator[Step]:
        """An answer that begins with content has none."""
        if not (yield from reader.has(*self.frames)):
            yield from super().read_reasoning(reader, is_inside)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last marker ends it; each is several tokens."""
        if self._is_inside is False:
            return True
        end, begin = (_places(input_ids, self._pieces(marker)) for marker in (self.ends[0], self.begins[0]))
        return bool(end) and end[-1] > max(begin, default=-1)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the ids so far end it: a marker may come in pieces."""
        return self.is_reasoning_end(input_ids)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens up to the end, without markers; none of an answer that begins with content."""
        ids = list(token_ids)
        begin, end = self._pieces(self.begins[0]), self._pieces(self.ends[0])
        if self._is_inside is False or 0 in _places(ids, self._pieces(self.frames[0])):
            return 0
        start = len(begin) if 0 in _places(ids, begin) else 0
        stop = next((place for place in _places(ids, end) if place >= start), len(ids))
        return stop - start

    def _pieces(self, marker: str) -> list[int]:
        return self.model_tokenizer.encode(marker, add_special_tokens=False)


class CohereCommandReasoningParser(ReasoningParser):
    """Command A and later; the content has markers, too. Calls and content end it."""

    names = ("cohere_command3", "cohere_command4")
    begins = ("<|START_THINKING|>",)
    ends = ("<|END_THINKING|>",)
    also_ends = ("<|START_ACTION|>", "<|START_RESPONSE|>", "<|START_TEXT|>")
    frames = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    template_marks = ("<|START_THINKING|>",)


class Plamo3ReasoningParser(ReasoningParser):
    """PLaMo 3. Calls end it, too."""

    names = ("plamo3",)
    begins = ("<|plamo:begin_think:plamo|>",)
    ends = ("<|plamo:end_think:plamo|>",)
    also_ends = ("<|plamo:begin_tool_requests:plamo|>",)
    template_marks = ("plamo:", "begin_think")


def _places(ids: Sequence[int], part: list[int]) -> list[int]:
    """Where `part` is among the ids."""
    return [place for place in range(len(ids) - len(part) + 1) if list(ids[place : place + len(part)]) == part]
