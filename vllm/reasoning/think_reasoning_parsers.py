"""<think> ... </think>, as most models mark it. They differ in whether an answer may leave the beginning out, and in
what else ends it."""

from typing import ClassVar

from vllm.reasoning.abs_reasoning_parsers import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    """Answers begin the reasoning, or the prompt does. A call ends it, too."""

    names = ("qwen3", "glm45", "deepseek_v3", "hunyuan_a13b", "ernie45", "holo2", "nemotron_v3", "step3")
    begins = ("<think>",)
    ends = ("</think>",)
    also_ends = ("<tool_call>",)
    template_marks = ("</think>",)


class DeepSeekR1ReasoningParser(ReasoningParser):
    """Answers always reason; the beginning may be missing."""

    names: ClassVar[tuple[str, ...]] = ("deepseek_r1", "olmo3", "step3p5")
    begins = ("<think>",)
    ends = ("</think>",)
    is_implicit = True
    template_marks: ClassVar[tuple[str, ...]] = ("<｜Assistant｜><think>",)


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
    template_marks = ("</think>", "<|tool_calls_section_begin|>")
