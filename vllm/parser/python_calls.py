"""Calls that are written as Python: name(argument=value, ...)."""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterator
from typing import Any

from vllm.parser.calls import Calls
from vllm.parser.reader import Ended, NotACall, Reader, Step
from vllm.parser.typed_values import dumps, parsed_python

_NAMES = {"true": True, "false": False, "null": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def python_calls(reader: Reader, calls: Calls, end: str = "") -> Iterator[Step]:
    """Read calls with commas, semicolons or line breaks between, up to and with `end`, or up to where none follows."""
    while True:
        yield from reader.skip_space()
        if end and (yield from reader.skip(end)):
            return
        if not end and calls.count and not (yield from _begins_name(reader)):
            return
        yield from python_call(reader, calls)
        yield from reader.skip_space()
        yield from reader.skip(",", ";")


def _begins_name(reader: Reader) -> Generator[None, None, bool]:
    char = yield from reader.peek()
    return char.isidentifier()


def python_call(reader: Reader, calls: Calls) -> Iterator[Step]:
    """Read one call; its events come when all of it is read."""
    name = yield from _name(reader, "(")
    arguments: dict[str, Any] = {}
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip(")")):
            break
        key = yield from _name(reader, "=")
        arguments[key] = yield from _value(reader)
        if not (yield from reader.skip(",")):
            yield from reader.expect(")")
            break
    yield calls.start(name)
    yield calls.arguments(dumps(arguments))
    yield from calls.end()


def _name(reader: Reader, end: str) -> Generator[None, None, str]:
    """Read a name, with dots or hyphens, and `end` after it."""
    name = ""
    while True:
        char = yield from reader.peek()
        if not char:
            raise Ended
        if char == end:
            reader.take(1)
            break
        if not (char.isidentifier() or (name and (char.isalnum() or char in ".-"))):
            yield from reader.skip_space()
            yield from reader.expect(end)
            break
        name += reader.take(1)
    if not name:
        raise NotACall
    return name


def _value(reader: Reader) -> Generator[None, None, Any]:
    """Read an expression up to the comma or bracket after it: its value."""
    open_brackets: list[str] = []
    text = ""
    while True:
        char = yield from reader.peek()
        if not char:
            raise Ended
        if not open_brackets and char in ",)":
            return _evaluated(text)
        if char in "\"'":
            text += yield from _string(reader, char)
            continue
        if char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif char in ")]}" and (not open_brackets or open_brackets.pop() != char):
            raise NotACall
        text += reader.take(1)


def _string(reader: Reader, char: str) -> Generator[None, None, str]:
    """Read a string: its text with the quotes. A line break within is written as one."""
    start = yield from reader.peek(3)
    if start[:2] == char * 2 and start != char * 3:
        return reader.take(2)
    quote = reader.take(3 if start == char * 3 else 1)
    text = quote
    while not (yield from reader.has(quote)):
        two = yield from reader.peek(2)
        if len(two) < 2:
            raise Ended
        piece = reader.take(2 if two[0] == "\\" else 1)
        text += "\\n" if piece == "\n" else piece
    return text + reader.take(len(quote))


def _evaluated(text: str) -> Any:
    try:
        return _value_of(parsed_python(text))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise NotACall from None


def _value_of(node: ast.expr) -> Any:
    """The value that JSON has for a literal. Raises ValueError for what is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value_of(node.operand)
        if isinstance(value, (int, float)):
            return -value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value_of(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value_of(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value_of, node.values), strict=True))
    raise ValueError
