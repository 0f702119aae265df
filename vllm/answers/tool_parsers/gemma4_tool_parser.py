"""call:name{key:value} between tokens of their own, as Gemma 4 and FunctionGemma write it; texts stand between <|"|> or
<escape>, and keys without quotes."""

from collections.abc import Generator, Iterator
from typing import ClassVar

from vllm.answers.reader import Ended, NotACall, Reader, Step
from vllm.answers.syntax.call_text import ArgumentText, CallText
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_value, parsed_json
from vllm.answers.syntax.schemas import ArgumentSchema
from vllm.answers.syntax.typed_values import as_json, dumps, json_object
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

TOOL_CALL_START, TOOL_CALL_END = "<|tool_call>", "<tool_call|>"
_ENDS = {TOOL_CALL_START: TOOL_CALL_END, "<start_function_call>": "<end_function_call>"}
_QUOTES = ('<|"|>', "<escape>")


class Gemma4ToolParser(ToolParser):
    """A call's events come when all of it is read."""

    names: ClassVar[tuple[str, ...]] = ("gemma4", "gemma")
    begins = tuple(_ENDS)
    template_marks = ("<|tool_call>",)
    call_text = CallText(
        "<|tool_call>call:", "{", "}<tool_call|>", arguments=ArgumentText("", ":", "", ":", ",", quote='<|"|>')
    )

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        yield from reader.skip_space()
        yield from reader.expect("call:", ":")
        name, _ = yield from reader.until("{")
        if not name.strip() or any(char.isspace() or char in "<>" for char in name.strip()):
            raise NotACall
        arguments = yield from _object(reader, calls.schema(name.strip()))
        yield calls.start(name)
        yield calls.arguments(arguments)
        yield from calls.end()
        yield from reader.close(_ENDS[marker])


class FunctionGemmaToolParser(Gemma4ToolParser):
    """For the choice by template: the markers of the other."""

    names = ("functiongemma",)
    template_marks = ("<start_function_call>",)
    call_text = CallText(
        "<start_function_call>call:",
        "{",
        "}<end_function_call>",
        arguments=ArgumentText("", ":", "", ":", ",", quote="<escape>"),
    )


def _object(reader: Reader, schema: ArgumentSchema) -> Generator[Step, None, str]:
    """Read up to and with the closing brace: JSON."""
    found: dict[str, str] = {}
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip("}")):
            return json_object(found)
        quote = yield from reader.skip(*_QUOTES)
        key, _ = yield from reader.until(quote or ":")
        key = key if quote else key.strip().strip('"')
        if quote:
            yield from reader.skip_space()
            yield from reader.expect(":")
        found[key] = yield from _value(reader, schema.property(key))
        yield from reader.skip_space()
        if not (yield from reader.skip(",")):
            yield from reader.expect("}")
            return json_object(found)


def _value(reader: Reader, schema: ArgumentSchema) -> Generator[Step, None, str]:
    yield from reader.skip_space()
    quote = yield from reader.skip(*_QUOTES)
    if quote:
        text, _ = yield from reader.until(quote)
        return dumps(text)
    if (yield from reader.has('"')):
        return dumps(parsed_json((yield from json_value(reader))))
    if (yield from reader.skip("{")):
        return (yield from _object(reader, schema))
    if (yield from reader.skip("[")):
        return (yield from _list(reader, schema.items))
    text = ""
    while True:
        char = yield from reader.peek()
        if not char:
            raise Ended
        if char in ",}]":
            return as_json(text.strip(), schema)
        text += reader.take(1)


def _list(reader: Reader, schema: ArgumentSchema) -> Generator[Step, None, str]:
    found: list[str] = []
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip("]")):
            break
        found.append((yield from _value(reader, schema)))
        yield from reader.skip_space()
        if not (yield from reader.skip(",")):
            yield from reader.expect("]")
            break
    return f"[{', '.join(found)}]"
