"""<think> ... </think>, as most models mark it. They differ in whether an answer may leave the beginning out."""

from vllm.reasoning.abs_reasoning_parsers import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    """Answers begin the reasoning, or the prompt does. A call ends it, too."""

    names = ("qwen3", "glm45", "deepseek_v3", "hunyuan_a13b", "holo2", "ernie45", "nemotron_v3", "step3")
    begins = ("<think>",)
    ends = ("</think>",)
    also_ends = ("<tool_call>",)
    template_marks = ("<think>",)


class DeepSeekR1ReasoningParser(ReasoningParser):
    """Always reason; the beginning may be missing."""

    names = ("deepseek_r1", "minimax_m2", "olmo3", "step3p5")
    begins = ("<think>",)
    ends = ("</think>",)
    is_implicit = True


class KimiK2ReasoningParser(ReasoningParser):
    """Calls end the reasoning, too."""

    names = ("kimi_k2",)
    begins = ("<think>",)
    ends = ("</think>",)
    also_ends = ("<|tool_calls_section_begin|>",)
    template_marks = ("<think>", "<|tool_calls_section_begin|>")
