"""Calls of MiniMax M3: <invoke name="..."><key>value</key></invoke> in <tool_call>, each tag with a marker before it.
Objects and lists are elements in elements; a list's are called item."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from vllm.parser.calls import Calls
from vllm.parser.reader import NotACall, Reader, Step
from vllm.parser.typed_values import as_json, dumps, is_text, resolved
from vllm.tool_parsers.abstract_tool_parser import ToolParser

_MARK = "]<]minimax[>["
_INVOKE, _INVOKE_END = f"{_MARK}<invoke name=", f"{_MARK}</invoke>"
_SECTION, _SECTION_END = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_ITEM = "item"
_Schema = Mapping[str, Any]


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
            root = calls.schemas.get(name, {})
            arguments = yield from _elements(reader, root, root, _INVOKE_END)
            yield calls.start(name)
            yield calls.arguments(dumps(_as_object(arguments)))
            yield from calls.end()


def _elements(reader: Reader, schema: _Schema, root: _Schema, end: str) -> Generator[Step, None, list[tuple[str, Any]]]:
    """Read elements, and white space between them, up to and with `end`: their names and values."""
    found: list[tuple[str, Any]] = []
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip(end)):
            return found
        yield from reader.expect(f"{_MARK}<")
        name, _ = yield from reader.until(">")
        if not name or name.startswith("/") or any(char in name for char in "<\n"):
            raise NotACall
        found.append((name, (yield from _value(reader, name, _inner(schema, name, root), root))))


def _value(reader: Reader, name: str, schema: _Schema, root: _Schema) -> Generator[Step, None, Any]:
    """Read what an element holds, and its end."""
    end = f"{_MARK}</{name}>"
    text, _ = yield from reader.until(_MARK)
    reader.untake()
    kind = schema.get("type")
    if (yield from reader.skip(end)):
        return _empty(kind) if not text.strip() and not is_text(schema) else _scalar(text, schema)
    if text.strip():
        raise NotACall
    elements = yield from _elements(reader, schema, root, end)
    is_list = kind == "array" or (kind is None and all(each == _ITEM for each, _ in elements))
    return [value for _, value in elements] if is_list else _as_object(elements)


def _inner(schema: _Schema, name: str, root: _Schema) -> _Schema:
    """The schema of an element in another one."""
    if schema.get("type") == "array" or (not schema.get("properties") and name == _ITEM):
        own = schema.get("items")
    else:
        properties, further = schema.get("properties"), schema.get("additionalProperties")
        own = properties.get(name, further) if isinstance(properties, Mapping) else further
    own = resolved(own, root)
    return own if isinstance(own, Mapping) else {}


def _empty(kind: Any) -> Any:
    return {"array": [], "object": {}}.get(kind, "") if isinstance(kind, str) else ""


def _scalar(text: str, schema: _Schema) -> Any:
    """A value without elements: what looks like an object or a list is a text, unless the schema has it."""
    value = json.loads(as_json(text, schema))
    return text if isinstance(value, (dict, list)) and not schema else value


def _as_object(elements: list[tuple[str, Any]]) -> dict[str, Any]:
    """Elements of one name are a list."""
    names = [name for name, _ in elements]
    several = {name: [value for own, value in elements if own == name] for name in names}
    return {name: values if len(values) > 1 else values[0] for name, values in several.items()}
