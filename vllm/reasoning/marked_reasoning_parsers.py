"""Reasoning between other markers."""

from vllm.reasoning.abs_reasoning_parsers import ReasoningParser


class MistralReasoningParser(ReasoningParser):
    """Magistral and later."""

    names = ("mistral",)
    begins = ("[THINK]",)
    ends = ("[/THINK]",)
    template_marks = ("[THINK]",)


class Gemma4ReasoningParser(ReasoningParser):
    """A channel of its own, whose name is the first line."""

    names = ("gemma4", "gemma")
    begins = ("<|channel>",)
    ends = ("<channel|>",)
    also_ends = ("<|tool_call>",)
    drops = "thought\n"
    template_marks = ("<|channel>",)


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
