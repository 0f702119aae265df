"""<tool_call>{"name": ..., "arguments": {...}}</tool_call> beside <response>, as Ernie 4.5 writes it."""

from vllm.parser.frames import ERNIE45
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser


class Ernie45ToolParser(Hermes2ProToolParser):
    """See ToolParser."""

    names = ("ernie45",)
    frames = ERNIE45
    template_marks = ("<tool_call>", "<response>")
