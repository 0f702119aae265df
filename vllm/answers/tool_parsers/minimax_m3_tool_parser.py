"""Calls of MiniMax M3: <invoke name="..."><key>value</key></invoke> in <tool_call>, each tag with a marker before it.
Objects and lists are elements in elements; a list's are called item."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from vllm.answers.reader import NotACall, Reader, Step
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.schemas import ArgumentSchema
from vllm.answers.syntax.typed_values import as_json, dumps, json_object
from vllm.answers.tool_parsers.abstract_tool_parser import ToolParser

_MARK = "]<]minimax[>["
_INVOKE, _INVOKE_END = f"{_MARK}<invoke name=", f"{_MARK}</invoke>"
_SECTION, _SECTION_END = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_ITEM = "item"
_NESTS = frozenset({"array", "object"})


class MinimaxM3ToolParser(ToolParser):
    """A call's events come when all of it is read."""

    names = ("minimax_m3",)
    begins = (_SECTION,)
    template_marks = (_MARK,)

    def read_calls(self, reader: Reader, calls: Calls, marker: str) -> Iterator[Step]:
        while (yield from reader.close(_INVOKE, _SECTION_END)) == _INVOKE:
            name, _ = yield from reader.until(">")
            name = name.strip().strip("\"'")
            if "\n" in name:
                raise NotACall
            arguments = yield from _elements(reader, calls.schema(name), _INVOKE_END)
            yield calls.start(name)
            yield calls.arguments(_as_object(arguments))
            yield from calls.end()


def _elements(reader: Reader, schema: ArgumentSchema, end: str) -> Generator[Step, None, list[tuple[str, str]]]:
    """Read elements, and white space between them, up to and with `end`: their names, and their values as JSON."""
    found: list[tuple[str, str]] = []
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip(end)):
            return found
        yield from reader.expect(f"{_MARK}<")
        name, _ = yield from reader.until(">")
        if not name or name.startswith("/") or any(char in name for char in "<\n"):
            raise NotACall
        found.append((name, (yield from _value(reader, name, _inner(schema, name)))))


def _value(reader: Reader, name: str, schema: ArgumentSchema) -> Generator[Step, None, str]:
    """Read what an element holds, and its end."""
    end = f"{_MARK}</{name}>"
    text, _ = yield from reader.until(_MARK)
    reader.untake()
    types = schema.allowed.types or frozenset()
    if (yield from reader.skip(end)):
        return _scalar(text, schema, types)
    if text.strip():
        raise NotACall
    elements = yield from _elements(reader, schema, end)
    is_list = all(each == _ITEM for each, _ in elements) if not types & _NESTS or types >= _NESTS else "array" in types
    return f"[{', '.join(value for _, value in elements)}]" if is_list else _as_object(elements)


def _inner(schema: ArgumentSchema, name: str) -> ArgumentSchema:
    """The schema of an element in another one."""
    if name == _ITEM and name not in schema.property_names and "object" not in (schema.allowed.types or ()):
        return schema.items
    return schema.items if schema.allowed.types == {"array"} else schema.property(name)


def _scalar(text: str, schema: ArgumentSchema, types: frozenset[str]) -> str:
    """A value without elements: what looks like an object or a list is a text, unless the schema has it."""
    if not text.strip() and not schema.is_text:
        return dumps(text) if "string" in types or not types & _NESTS else "[]" if "array" in types else "{}"
    value = as_json(text, schema)
    return dumps(text) if value[0] in "[{" and not types else value


def _as_object(elements: list[tuple[str, str]]) -> str:
    """Elements of one name are a list."""
    names = [name for name, _ in elements]
    several = {name: [value for own, value in elements if own == name] for name in names}
    return json_object(
        {name: f"[{', '.join(values)}]" if len(values) > 1 else values[0] for name, values in several.items()}
    )
