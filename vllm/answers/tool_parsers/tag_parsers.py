"""Calls whose arguments are elements of a markup: a tag, or a pair of them, for each."""

import html
import re
from collections.abc import Iterator
from typing import ClassVar

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.reasoning.marked_reasoning_parsers import KimiK3ReasoningParser
from vllm.answers.syntax.call_text import ANY_NUMBER, ANY_WORD, ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls, json_object_call
from vllm.answers.syntax.tag_calls import Tags, invoked_calls, tag_arguments
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser


class Qwen3CoderToolParser(ToolParser):
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, as Qwen3-Coder writes it, and
    Seed-OSS with outer tags of its own. The outer tags may be missing."""

    names: ClassVar[tuple[str, ...]] = ("qwen3_coder", "qwen3_xml", "step3p5", "step5", "nemotron_v3", "mimo")
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    values_on_lines: ClassVar[bool] = True
    call_text: ClassVar[CallText] = CallText(
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        "\n",
        arguments=ArgumentText("<parameter=", ">\n", "\n</parameter>\n", ">\n"),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        end = f"</{self.begins[0][1:]}"
        ends = ("</function>", end)
        tags = Tags("<parameter=", ">", "</parameter>", ends, on_lines=self.values_on_lines, may_be_open=True)
        yield from reader.skip_space()
        if marker == self.begins[0]:
            yield from reader.expect("<function=")
        name, _ = yield from reader.until(">")
        if "\n" in name:
            raise NotACall
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name.strip(), tags)
        yield from reader.skip_end(end)


class SeedOssToolParser(Qwen3CoderToolParser):
    """<seed:tool_call>; line ends around a value are the value's."""

    names = ("seed_oss",)
    begins = ("<seed:tool_call>", "<function=")
    template_marks = ("<seed:tool_call>",)
    values_on_lines = False
    call_text = CallText(
        "<seed:tool_call>\n<function=",
        ">\n",
        "</function>\n</seed:tool_call>",
        "\n",
        arguments=ArgumentText("<parameter=", ">", "</parameter>\n", ">"),
    )


_GLM_TAGS = Tags("<arg_key>", "</arg_key>", "</arg_value>", ("</tool_call>",), value_begin="<arg_value>")


class Glm4MoeModelToolParser(ToolParser):
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, as GLM 4.5 to 4.7 write it."""

    names = ("glm45", "glm47", "ling3", "poolside_v1")
    begins = ("<tool_call>",)
    template_marks = ("<tool_call>", "<arg_key>")
    call_text = CallText(
        "<tool_call>",
        "\n",
        "</tool_call>",
        "\n",
        arguments=ArgumentText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_key>\n<arg_value>"),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        name, found = yield from reader.until("\n", "<arg_key>", "</tool_call>")
        if not name.strip() and found == "\n":
            name, found = yield from reader.until("\n", "<arg_key>", "</tool_call>")
        name = name.strip()
        if not name or any(char in name for char in '{}"<> '):
            raise NotACall
        reader.untake()
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name, _GLM_TAGS)


class HYV3ToolParser(ToolParser):
    """<tool_call>name<tool_sep><arg_key>key</arg_key><arg_value>value</arg_value></tool_call> in <tool_calls>, as
    Hunyuan 3 writes it, and Hunyuan 4 without the separator. All of a model's tags may have a suffix:
    <tool_calls:suffix>."""

    names: ClassVar[tuple[str, ...]] = ("hy_v3",)
    begins = ("<tool_calls>", "<tool_calls:")
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_calls", "<tool_call", "<tool_sep", "<arg_key", "<arg_value")
    call_text: ClassVar[CallText] = CallText(
        "<tool_call>",
        "<tool_sep>\n",
        "</tool_call>\n",
        first="<tool_calls>\n",
        last="</tool_calls>",
        arguments=ArgumentText("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</arg_key>\n<arg_value>"),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        end = ">"
        if marker.endswith(":"):
            suffix, _ = yield from reader.until(">")
            end = f":{suffix}>"
        if not end[:-1].lstrip(":").replace("_", "").isalnum() and end != ">":
            raise NotACall
        tags = Tags(
            f"<arg_key{end}", f"</arg_key{end}", f"</arg_value{end}", (f"</tool_call{end}",), f"<arg_value{end}"
        )
        while (yield from reader.close(f"<tool_call{end}", f"</tool_calls{end}")) == f"<tool_call{end}":
            name, found = yield from reader.until(f"<tool_sep{end}", tags.begin, *tags.call_end)
            name = name.strip()
            if not name or any(char in name for char in '{}"<> \n'):
                raise NotACall
            if not found.startswith("<tool_sep"):
                reader.untake()
            yield calls.start(name)
            yield from tag_arguments(reader, calls, name, tags)


class HYV4ToolParser(HYV3ToolParser):
    """For the choice by template, and for grammars."""

    names = ("hy_v4",)
    template_marks = ("<tool_calls", "<tool_call", "<arg_key", "<arg_value")
    call_text = HYV3ToolParser.call_text._replace(between="\n")


_K2_CALL, _K2_CALL_END = "<ifm|tool_call>", "</ifm|tool_call>"
_K2_SECTION, _K2_SECTION_END = "<ifm|tool_calls>", "</ifm|tool_calls>"
_K2_TAGS = Tags(
    "<ifm|arg_key>",
    "</ifm|arg_key>",
    "</ifm|arg_value>",
    (_K2_CALL_END,),
    value_begin="<ifm|arg_value>",
    type_tags=("<ifm|arg_type>", "</ifm|arg_type>"),
)


class K2HorizonToolParser(ToolParser):
    """<ifm|tool_call>name<ifm|arg_key>key</ifm|arg_key><ifm|arg_value>value</ifm|arg_value></ifm|tool_call> in
    <ifm|tool_calls>, as K2 Horizon writes it. Arguments may have their type before the value; a call may be JSON."""

    names = ("k2_horizon",)
    begins = (_K2_SECTION,)
    template_marks = (_K2_SECTION,)
    call_text = CallText(
        _K2_CALL,
        "",
        _K2_CALL_END,
        "\n",
        _K2_SECTION,
        _K2_SECTION_END,
        ArgumentText(
            "<ifm|arg_key>", "</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>", "</ifm|arg_key><ifm|arg_value>"
        ),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while (yield from reader.close(_K2_CALL, _K2_SECTION_END)) == _K2_CALL:
            yield from reader.skip_space()
            if (yield from reader.has("{")):
                yield from json_object_call(reader, calls)
                yield from reader.close(_K2_CALL_END)
                continue
            name, _ = yield from reader.until("<ifm|arg_key>", _K2_CALL_END)
            name = name.strip()
            if not name or any(char in name for char in '{}"<> \n'):
                raise NotACall
            reader.untake()
            yield calls.start(name)
            yield from tag_arguments(reader, calls, name, _K2_TAGS)


_MINICPM_TAGS = Tags(
    "<param name=",
    ">",
    "</param>",
    ("</function>",),
    quoted=True,
    raw=("<![CDATA[", "]]>"),
    also_begin=("<paramname=",),
)


class MiniCPM5XMLToolParser(ToolParser):
    """<function name="..."><param name="key">value</param></function>, as MiniCPM 5 writes it. A value may be a section
    of raw text; spaces in tags may be missing."""

    names = ("minicpm5",)
    begins = ("<function name=", "<functionname=")
    template_marks = ("<function name=", "<param name=")
    call_text = CallText(
        '<function name="',
        '">',
        "</function>",
        "\n",
        arguments=ArgumentText('<param name="', '">', "</param>", '">'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        name, _ = yield from reader.until(">")
        name = name.strip().strip("\"'")
        if "\n" in name:
            raise NotACall
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name, _MINICPM_TAGS)


_MINIMAX_TAGS = Tags("<parameter name=", ">", "</parameter>", ("</invoke>",), quoted=True)


class MinimaxM2ToolParser(ToolParser):
    """<invoke name="..."><parameter name="key">value</parameter></invoke> in <minimax:tool_call>: MiniMax M2."""

    names = ("minimax_m2",)
    begins = ("<minimax:tool_call>",)
    template_marks = ("<minimax:tool_call>",)
    call_text = CallText(
        '<invoke name="',
        '">\n',
        "</invoke>\n",
        first="<minimax:tool_call>\n",
        last="</minimax:tool_call>",
        arguments=ArgumentText('<parameter name="', '">', "</parameter>\n", '">'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from invoked_calls(reader, calls, "<invoke name=", "</minimax:tool_call>", _MINIMAX_TAGS)


_DOTS_END = "</dots_function_call>"
_DOTS_TAGS = Tags("<parameter name=", ">", "</parameter>", ("</invoke>",), quoted=True)


class DotsToolParser(ToolParser):
    """<invoke name="..."><parameter name="key">value</parameter></invoke> in <dots_function_call>, as Dots writes it.
    Also with JSON in it."""

    names = ("dots",)
    begins = ("<dots_function_call>",)
    template_marks = ("<dots_function_call>",)
    call_text = CallText(
        '<invoke name="',
        '">',
        "</invoke>",
        first="<dots_function_call>",
        last=_DOTS_END,
        arguments=ArgumentText('<parameter name="', '">', "</parameter>", '">'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        if (yield from reader.has("{", "[")):
            yield from json_calls(reader, calls)
            yield from reader.close(_DOTS_END)
        else:
            yield from invoked_calls(reader, calls, "<invoke name=", _DOTS_END, _DOTS_TAGS)


def _call_text(section: str, space: str = "") -> CallText:
    mark = f"｜DSML｜{space}"
    return CallText(
        f'<{mark}invoke name="',
        '">\n',
        f"</{mark}invoke>\n",
        first=f"<{mark}{section}>\n",
        last=f"</{mark}{section}>",
        arguments=ArgumentText(
            f'<{mark}parameter name="', '" string="false">', f"</{mark}parameter>\n", '" string="true">'
        ),
    )


class DeepSeekV32ToolParser(ToolParser):
    """DeepSeek's markup from V3.2 on: a function in a tag, its arguments in tags that say whether they are texts. The
    section's tags may be missing."""

    names: ClassVar[tuple[str, ...]] = ("deepseek_v32",)
    begins: ClassVar[tuple[str, ...]] = ("<｜DSML｜function_calls>",)
    begins_unread: ClassVar[tuple[str, ...]] = ("<｜DSML｜invoke name=",)
    template_marks: ClassVar[tuple[str, ...]] = ("<｜DSML｜function_calls>",)
    call_text: ClassVar[CallText] = _call_text("function_calls")
    space: ClassVar[str] = ""  # before the names of tags

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        mark = f"｜DSML｜{self.space}"
        tags = Tags(
            f"<{mark}parameter name=",
            ">",
            f"</{mark}parameter>",
            (f"</{mark}invoke>",),
            quoted=True,
            text_sign='string="true"',
        )
        yield from invoked_calls(reader, calls, f"<{mark}invoke name=", f"</{self.begins[0][1:]}", tags)


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """Another name of the section."""

    names = ("deepseek_v4",)
    begins = ("<｜DSML｜tool_calls>",)
    template_marks = ("<｜DSML｜tool_calls>",)
    call_text = _call_text("tool_calls")


class DeepSeekV41ToolParser(DeepSeekV32ToolParser):
    """A space before the names of tags."""

    names = ("deepseek_v41",)
    begins = ("<｜DSML｜ calls>",)
    begins_unread = ("<｜DSML｜ invoke name=",)
    template_marks = ("<｜DSML｜ calls>",)
    call_text = _call_text("calls", " ")
    space = " "


_STEP_SECTION, _STEP_SECTION_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_STEP_CALL, _STEP_CALL_END, _STEP_SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_STEP_TAGS = Tags("<steptml:parameter name=", ">", "</steptml:parameter>", ("</steptml:invoke>",), quoted=True)


class Step3ToolParser(ToolParser):
    """Step 3: <steptml:invoke name="..."><steptml:parameter name="key">value</steptml:parameter></steptml:invoke>, each
    between tokens of its own, in a section. The type before a separator, and separators between calls, may be
    missing."""

    names = ("step3",)
    begins = (_STEP_SECTION,)
    template_marks = ("<steptml:invoke",)
    call_text = CallText(
        f'{_STEP_CALL}function{_STEP_SEPARATOR}<steptml:invoke name="',
        '">',
        f"</steptml:invoke>{_STEP_CALL_END}",
        first=_STEP_SECTION,
        last=_STEP_SECTION_END,
        arguments=ArgumentText('<steptml:parameter name="', '">', "</steptml:parameter>", '">'),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while True:
            found = yield from reader.close(_STEP_CALL, _STEP_SEPARATOR, _STEP_SECTION_END)
            if found == _STEP_SECTION_END:
                return
            if found == _STEP_CALL:
                if (yield from reader.skip("function")):
                    yield from reader.close(_STEP_SEPARATOR)
                yield from invoked_calls(reader, calls, "<steptml:invoke name=", _STEP_CALL_END, _STEP_TAGS)


_KIMI_SECTION, _KIMI_SECTION_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_KIMI_CALL, _KIMI_CALL_END = "<|open|>call ", "<|close|>call<|sep|>"
_KIMI_ARGUMENT, _KIMI_ARGUMENT_END = "<|open|>argument key=", "<|close|>argument<|sep|>"
_KIMI_TOOL = re.compile(r'\btool="([^"]*)"')
_KIMI_TAGS = Tags(
    _KIMI_ARGUMENT,
    "<|sep|>",
    _KIMI_ARGUMENT_END,
    (_KIMI_CALL_END,),
    quoted=True,
    text_sign='type="string"',
    is_escaped=True,
)


class KimiK3ToolParser(ToolParser):
    """Calls of Kimi K3: <|open|>call tool="name" index="1"<|sep|> in <|open|>tools<|sep|>, and in each call
    <|open|>argument key="key" type="string"<|sep|>value<|close|>argument<|sep|>."""

    names = ("kimi_k3",)
    begins = (_KIMI_SECTION,)
    frames = KimiK3ReasoningParser.frames
    template_marks = ("<|open|>", "<|close|>", "<|sep|>")
    call_text = CallText(
        f'{_KIMI_CALL}tool="',
        f'" index="{ANY_NUMBER}"<|sep|>',
        _KIMI_CALL_END,
        first=_KIMI_SECTION,
        last=_KIMI_SECTION_END,
        arguments=ArgumentText(
            f'{_KIMI_ARGUMENT}"', f'" type="{ANY_WORD}"<|sep|>', _KIMI_ARGUMENT_END, '" type="string"<|sep|>'
        ),
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while (yield from reader.close(_KIMI_CALL, _KIMI_SECTION_END)) == _KIMI_CALL:
            attributes, _ = yield from reader.until("<|sep|>")
            found = _KIMI_TOOL.search(attributes)
            if found is None or "<|" in attributes:
                raise NotACall
            name = html.unescape(found[1])
            yield calls.start(name)
            yield from tag_arguments(reader, calls, name, _KIMI_TAGS)
