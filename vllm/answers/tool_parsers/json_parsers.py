"""Calls whose arguments are JSON: objects with names and arguments, or names and JSON between markers."""

import random
import string
from collections.abc import Iterator, Mapping
from typing import ClassVar

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.reasoning.marked_reasoning_parsers import CohereCommandReasoningParser
from vllm.answers.reasoning.think_reasoning_parsers import Ernie45ReasoningParser
from vllm.answers.syntax.call_text import ANY_NUMBER, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_arguments, json_calls, json_object_call, json_value, parsed_json
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class JsonToolParser(ToolParser):
    """Objects, or a list of them, behind a marker.

    Attributes:
        ends: what closes the calls behind a marker, where something does.
    """

    ends: ClassVar[Mapping[str, str]] = {}

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from json_calls(reader, calls)
        if marker in self.ends:
            yield from reader.close(self.ends[marker])


class Hermes2ProToolParser(JsonToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes 2 Pro, Qwen 2.5 and Qwen 3 write it."""

    names: ClassVar[tuple[str, ...]] = ("hermes", "qwen3_json", "longcat", "granite4")
    begins = ("<tool_call>", "<longcat_tool_call>")
    ends: ClassVar[Mapping[str, str]] = {marker: f"</{marker[1:]}" for marker in begins}
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    call_text = CallText('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")


class Ernie45ToolParser(Hermes2ProToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call> beside <response>, as Ernie 4.5 writes it."""

    names = ("ernie45",)
    frames = Ernie45ReasoningParser.frames
    template_marks = ("<tool_call>", "<response>")


class GraniteToolParser(JsonToolParser):
    """<|tool_call|>[{"name": ..., "arguments": {...}}, ...], as Granite 3 writes it; <function_call>{...}."""

    names = ("granite", "granite-20b-fc")
    begins = ("<|tool_call|>", "<tool_call>", "<function_call>")
    template_marks = ("<|tool_call|>", "granite")
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "<|tool_call|>[", "]")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from super().read_calls(reader, calls, marker)
        yield from reader.skip_end("</tool_call>")


class Internlm2ToolParser(JsonToolParser):
    """<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>, as InternLM 2 and 2.5 write it."""

    names = ("internlm",)
    begins = ("<|action_start|>",)
    ends = {"<|action_start|>": "<|action_end|>"}
    template_marks = ("<|action_start|>", "<|plugin|>")
    call_text = CallText('<|action_start|><|plugin|>{"name": "', '", "parameters": ', "}<|action_end|>")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        yield from reader.expect("<|plugin|>")
        yield from super().read_calls(reader, calls, marker)


class JambaToolParser(ToolParser):
    """<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>, as Jamba and Hunyuan write it. Objects may
    also stand one a line."""

    names = ("jamba", "hunyuan_a13b", "minimax")
    begins = ("<tool_calls>",)
    template_marks = ("<tool_calls>",)
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "<tool_calls>[", "]</tool_calls>")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            yield from reader.skip_space()
            if (yield from reader.skip("</tool_calls>")):
                return
            yield from json_calls(reader, calls)


class JsonArrayToolParser(JsonToolParser):
    """[{"name": ..., "parameters": {...}}, ...]: how forced calls are written where a format's own way is no JSON, and
    the way of some models."""

    names = ("json_array",)
    begins_at_start = ("[",)
    call_text = CallText('{"name": "', '", "parameters": ', "}", ", ", "[", "]")


class Phi4MiniJsonToolParser(JsonToolParser):
    """functools[{"name": ..., "arguments": {...}}, ...], as Phi-4 mini writes it. Also between <|tool_call|> and
    <|/tool_call|>."""

    names = ("phi4_mini_json",)
    begins = ("functools", "<|tool_call|>")
    ends = {"<|tool_call|>": "<|/tool_call|>"}
    template_marks = ("<|tool|>", "<|/tool|>")
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "functools[", "]")


class XLAMToolParser(JsonToolParser):
    """[{"name": ..., "arguments": {...}}, ...] as the answer, in a block of code or after a marker: xLAM."""

    names = ("xlam",)
    ends = {"```json": "```", "```": "```", "<tool_call>": "</tool_call>"}
    begins = ("[TOOL_CALLS]", *ends)
    begins_at_start = ("[",)
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "[", "]")


class GigaChat3ToolParser(JsonToolParser):
    """<|function_call|>{"name": ..., "arguments": {...}}, as GigaChat 3.1 writes it; 3 has a turn of its own for it."""

    names = ("gigachat3",)
    begins = ("<|function_call|>", "function call<|role_sep|>\n")
    frames = ("<|message_sep|>",)
    template_marks = ("<|role_sep|>", "<|message_sep|>")
    call_text = CallText('<|function_call|>{"name": "', '", "arguments": ', "}")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from super().read_calls(reader, calls, marker)
        yield from reader.skip_end("</s>")


class CohereCommand3ToolParser(JsonToolParser):
    """<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>: Command."""

    names: ClassVar[tuple[str, ...]] = ("cohere_command3",)
    begins = ("<|START_ACTION|>",)
    ends = {"<|START_ACTION|>": "<|END_ACTION|>"}
    frames = CohereCommandReasoningParser.frames
    template_marks: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>",)
    call_text = CallText(
        f'{{"tool_call_id": "{ANY_NUMBER}", "tool_name": "',
        '", "parameters": ',
        "}",
        ",\n    ",
        "<|START_ACTION|>[\n    ",
        "\n]<|END_ACTION|>",
    )


class CohereCommand4ToolParser(CohereCommand3ToolParser):
    """For the choice by template."""

    names = ("cohere_command4",)
    template_marks = ("<|START_ACTION|>", "<|START_TEXT|>")


class Llama3JsonToolParser(ToolParser):
    """{"name": ..., "parameters": {...}}, with semicolons between several, as Llama 3 writes it. Also with a text
    before and after. An object without parameters is none of its calls."""

    names = ("llama3_json", "llama4_json")
    begins = ("<|python_tag|>",)
    begins_at_start = ("{",)
    begins_unread = ('{"name"',)
    template_marks = ('"parameters": dictionary of argument name and its value',)
    call_text = CallText('{"name": "', '", "parameters": ', "}", "; ")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            yield from reader.skip_space()
            yield from json_object_call(reader, calls, needs_arguments=True)
            reader.mark()
            yield from reader.skip_space()
            if not (yield from reader.skip(";", ",")) and not (yield from reader.has("{")):
                reader.put_back(reader.since_mark())
                return


_ID_CHARACTERS = string.ascii_letters + string.digits


class MistralToolParser(ToolParser):
    """[TOOL_CALLS]name[ARGS]{...} for each call; of older models [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...].
    Ids of calls have nine letters and digits: templates refuse others."""

    names = ("mistral",)
    begins = ("[TOOL_CALLS]",)
    template_marks = ("[TOOL_CALLS]",)
    call_text = CallText('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]")

    def make_id(self, name: str, index: int) -> str:
        return "".join(random.choices(_ID_CHARACTERS, k=9))

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        if (yield from reader.has("[{", "[ ", "[\n", "[]", "{")):
            yield from json_calls(reader, calls)
            return
        name, found = yield from reader.until("[ARGS]", "[CALL_ID]", "{", "[TOOL_CALLS]")
        call_id = None
        if found == "[CALL_ID]":
            call_id, found = yield from reader.until("[ARGS]")
        if found == "[TOOL_CALLS]" or "\n" in name.strip():
            raise NotACall
        if found == "{":
            reader.untake()
        yield calls.start(name, call_id)
        yield from reader.skip_space()
        yield from json_arguments(reader, calls)
        yield from calls.end()


TOOL_CALLS_PREFIX, TOOL_CALLS_SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


class ApertusToolParser(ToolParser):
    """<|tools_prefix|>[{"name": {...}}, ...]<|tools_suffix|>, as Apertus writes it: names are keys."""

    names = ("apertus",)
    begins = (TOOL_CALLS_PREFIX,)
    template_marks = (TOOL_CALLS_PREFIX,)
    call_text = CallText('{"', '": ', "}", ", ", f"{TOOL_CALLS_PREFIX}[", f"]{TOOL_CALLS_SUFFIX}")

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        yield from reader.expect("[")
        while True:
            found = yield from reader.close("{", "]")
            if found == "]":
                break
            yield from reader.skip_space()
            if not (yield from reader.has('"')):
                raise NotACall
            yield calls.start(parsed_json((yield from json_value(reader))))
            yield from reader.skip_space()
            yield from reader.expect(":")
            yield from reader.skip_space()
            yield from json_arguments(reader, calls)
            yield from reader.close("}")
            yield from calls.end()
            yield from reader.skip_space()
            yield from reader.skip(",")
        yield from reader.close(TOOL_CALLS_SUFFIX)


_DEEPSEEK_SECTION, _DEEPSEEK_SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END, _DEEPSEEK_SEPARATOR = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)


class DeepSeekV31ToolParser(ToolParser):
    """Calls of DeepSeek between tokens of their own: V3 has the arguments in a block of code, V3.1 as they are. The
    name before the separator, the arguments after it."""

    names = ("deepseek_v31",)
    begins = (_DEEPSEEK_SECTION, _DEEPSEEK_CALL)
    template_marks: ClassVar[tuple[str, ...]] = (_DEEPSEEK_SECTION, _DEEPSEEK_SEPARATOR)
    call_text = CallText(
        _DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR, _DEEPSEEK_CALL_END, "", _DEEPSEEK_SECTION, _DEEPSEEK_SECTION_END
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        is_in_call = marker == _DEEPSEEK_CALL
        while True:
            yield from reader.skip_space()
            if not is_in_call:
                found = yield from reader.close(_DEEPSEEK_CALL, _DEEPSEEK_SECTION_END)
                if found == _DEEPSEEK_SECTION_END:
                    return
            is_in_call = False
            yield from self.read_call(reader, calls)
            yield from reader.close(_DEEPSEEK_CALL_END)

    def read_call(self, reader: Reader, calls: Calls) -> Iterator[Step]:
        """Read what stands between a call's markers."""
        name, _ = yield from reader.until(_DEEPSEEK_SEPARATOR)
        yield calls.start(name)
        yield from reader.skip_space()
        yield from json_arguments(reader, calls)
        yield from calls.end()


class DeepSeekV3ToolParser(DeepSeekV31ToolParser):
    """A type before the separator, the name on the rest of the line, the arguments as a block of code."""

    names = ("deepseek_v3",)
    template_marks = (_DEEPSEEK_SECTION, _DEEPSEEK_SEPARATOR, "```json")
    call_text = CallText(
        f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEPARATOR}",
        "\n```json\n",
        f"\n```{_DEEPSEEK_CALL_END}",
        "\n",
        _DEEPSEEK_SECTION,
        _DEEPSEEK_SECTION_END,
    )

    def read_call(self, reader: Reader, calls: Calls) -> Iterator[Step]:
        yield from reader.until(_DEEPSEEK_SEPARATOR)
        name, _ = yield from reader.until("\n")
        yield calls.start(name)
        yield from reader.skip_space()
        yield from reader.skip("```json", "```")
        yield from reader.skip_space()
        yield from json_arguments(reader, calls)
        yield from reader.skip_space()
        yield from reader.skip("```")
        yield from calls.end()


_KIMI_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_KIMI_SECTION_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")


class KimiK2ToolParser(ToolParser):
    """<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|> in a section, as Kimi K2
    writes it. What stands before the arguments is the call's id, too."""

    names = ("kimi_k2",)
    begins = _KIMI_SECTIONS
    template_marks = ("<|tool_calls_section_begin|>",)
    call_text = CallText(
        "<|tool_call_begin|>functions.",
        f":{ANY_NUMBER}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        first=_KIMI_SECTIONS[0],
        last=_KIMI_SECTION_ENDS[0],
    )

    def make_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            found = yield from reader.close("<|tool_call_begin|>", *_KIMI_SECTION_ENDS)
            if found in _KIMI_SECTION_ENDS:
                return
            call_id, _ = yield from reader.until("<|tool_call_argument_begin|>")
            call_id = call_id.strip()
            if "<|" in call_id:
                raise NotACall
            name = call_id.rpartition(":")[0] or call_id
            yield calls.start(name.removeprefix("functions."), call_id)
            yield from reader.skip_space()
            yield from json_arguments(reader, calls)
            yield from reader.close("<|tool_call_end|>")
            yield from calls.end()


def _plamo_token(name: str) -> str:
    return f"<|plamo:{name}:plamo|>"


_PLAMO_SECTION, _PLAMO_SECTION_END = _plamo_token("begin_tool_requests"), _plamo_token("end_tool_requests")
_PLAMO_CALL, _PLAMO_CALL_END = _plamo_token("begin_tool_request"), _plamo_token("end_tool_request")
_PLAMO_NAME, _PLAMO_NAME_END = _plamo_token("begin_tool_name"), _plamo_token("end_tool_name")
_PLAMO_ARGUMENTS, _PLAMO_ARGUMENTS_END = _plamo_token("begin_tool_arguments"), _plamo_token("end_tool_arguments")
_PLAMO_AS_JSON = "<|plamo:constrain|>json<|plamo:msg|>"


class Plamo3ToolParser(ToolParser):
    """Names and arguments between tokens of their own, as PLaMo 3 writes them."""

    names = ("plamo3",)
    begins = (_PLAMO_SECTION,)
    template_marks = ("plamo:", "begin_tool_request")
    call_text = CallText(
        _PLAMO_CALL + _PLAMO_NAME,
        _PLAMO_NAME_END + _PLAMO_ARGUMENTS + _PLAMO_AS_JSON,
        _PLAMO_ARGUMENTS_END + _PLAMO_CALL_END,
        first=_PLAMO_SECTION,
        last=_PLAMO_SECTION_END,
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while (yield from reader.close(_PLAMO_CALL, _PLAMO_SECTION_END)) == _PLAMO_CALL:
            yield from reader.close(_PLAMO_NAME)
            name, _ = yield from reader.until(_PLAMO_NAME_END)
            if "<|" in name:
                raise NotACall
            yield calls.start(name)
            yield from reader.close(_PLAMO_ARGUMENTS)
            yield from reader.skip_space()
            yield from reader.skip(_PLAMO_AS_JSON)
            yield from reader.skip_space()
            yield from json_arguments(reader, calls)
            yield from reader.close(_PLAMO_ARGUMENTS_END)
            yield from calls.end()
            yield from reader.close(_PLAMO_CALL_END)
