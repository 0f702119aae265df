"""<tool_call>{"name": ..., "arguments": {...}}</tool_call> beside <response>, as Ernie 4.5 writes it."""

from vllm.answers.reasoning.think_reasoning_parsers import Ernie45ReasoningParser
from vllm.answers.tool_parsers.hermes_tool_parser import Hermes2ProToolParser


class Ernie45ToolParser(Hermes2ProToolParser):
    """See ToolParser."""

    names = ("ernie45",)
    frames = Ernie45ReasoningParser.frames
    template_marks = ("<tool_call>", "<response>")
