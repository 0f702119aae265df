"""<think> ... </think>, as most models mark it. They differ in whether an answer may leave the beginning out, and in
what else ends it."""

from collections.abc import Iterator
from typing import Any, ClassVar

from vllm.answers.events import as_content
from vllm.answers.reader import Reader, Step
from vllm.answers.reasoning.abs_reasoning_parsers import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    """Answers begin the reasoning, or the prompt does. A call ends it, too."""

    names: ClassVar[tuple[str, ...]] = (
        "qwen3",
        "glm45",
        "glm47",
        "ling3",
        "nemotron_v3",
        "mimo",
        "minicpmv",
    )
    begins = ("<think>",)
    ends = ("</think>",)
    also_ends: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    thinks: ClassVar[bool] = True
    template_marks: ClassVar[tuple[str, ...]] = ("</think>",)


class GraniteThinkingReasoningParser(Qwen3ReasoningParser):
    """Granite 4 and later: line breaks only part the content from it."""

    names = ("granite_thinking_parser",)
    drops_after = "\n"
    template_marks = ()


class DeepSeekV3ReasoningWithThinkingParser(Qwen3ReasoningParser):
    """Hybrids that think unless told not to."""

    names: ClassVar[tuple[str, ...]] = ("holo2",)
    template_marks = ()


class DeepSeekV3ReasoningParser(DeepSeekV3ReasoningWithThinkingParser):
    """Hybrids that think if told to."""

    names: ClassVar[tuple[str, ...]] = (
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "deepseek_v4",
        "deepseek_v41",
        "poolside_v1",
    )
    thinks = False


class DeepSeekR1ReasoningParser(ReasoningParser):
    """Answers always reason; the beginning may be missing."""

    names: ClassVar[tuple[str, ...]] = ("deepseek_r1", "olmo3", "step3", "step3p5", "step5")
    begins = ("<think>",)
    ends = ("</think>",)
    is_implicit = True
    thinks = True
    template_marks: ClassVar[tuple[str, ...]] = ("<｜Assistant｜><think>",)


class Ernie45ReasoningParser(Qwen3ReasoningParser):
    """The content has markers, too."""

    names = ("ernie45",)
    frames = ("<response>", "</response>")
    template_marks = ("</think>", "<response>")


class HYV3ReasoningParser(Qwen3ReasoningParser):
    """Hunyuan 3 and 4: by `reasoning_effort` where no prompt is known. Calls end it, too."""

    names = ("hy_v3", "hy_v4")
    also_ends = ("<tool_calls>", "<tool_calls:")
    template_marks = ("</think>", "<tool_calls", "<arg_key")

    def __init__(
        self, tokenizer: Any = None, *args: Any, chat_template_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(tokenizer, *args, chat_template_kwargs=chat_template_kwargs, **kwargs)
        effort = (chat_template_kwargs or {}).get("reasoning_effort")
        self._is_inside = effort not in (None, "none", "no_think")


class MiniMaxM2ReasoningParser(DeepSeekR1ReasoningParser):
    """A call ends it, too."""

    names = ("minimax_m2",)
    also_ends = ("<minimax:tool_call>",)
    template_marks = ("</think>", "<minimax:tool_call>")


class KimiK2ReasoningParser(ReasoningParser):
    """Calls end it, too."""

    names = ("kimi_k2",)
    begins = ("<think>",)
    ends = ("</think>",)
    also_ends = ("<|tool_calls_section_begin|>",)
    thinks = True
    template_marks = ("</think>", "<|tool_calls_section_begin|>")


class HunyuanA13BReasoningParser(ReasoningParser):
    """The content has markers, too."""

    names = ("hunyuan_a13b",)
    begins = ("<think>\n",)
    ends = ("\n</think>\n<answer>\n",)
    template_marks = ("</think>", "<answer>")

    def read_content(self, reader: Reader) -> Iterator[Step]:
        """Read up to the end of the answer."""
        yield from reader.text_until(("\n</answer>",), as_content)
        yield from reader.text_until((), as_content)


class MiniMaxM2AppendThinkReasoningParser(ReasoningParser):
    """All is content, with the marker that the prompt has."""

    names = ("minimax_m2_append_think",)
    ends = ("</think>",)
    is_implicit = True

    def read_reasoning(self, reader: Reader, is_inside: bool | None) -> Iterator[Step]:
        """Read nothing; the marker is the first of the content."""
        reader.put_back("<think>")
        reader.mark()
        yield from ()


class IdentityReasoningParser(ReasoningParser):
    """All is content: of models that are told not to think."""

    def read_reasoning(self, reader: Reader, is_inside: bool | None) -> Iterator[Step]:
        """Read nothing."""
        yield from ()

    def is_reasoning_end(self, input_ids: Any) -> bool:
        """Always."""
        return True

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """All of them."""
        return input_ids
