"""Calls that are written as Python: name(argument=value, ...)."""

from __future__ import annotations

import ast
import re
from collections.abc import Generator, Iterator
from typing import Any

from vllm.parser.calls import Calls
from vllm.parser.reader import Ended, NotACall, Reader, Step
from vllm.parser.typed_values import dumps, parsed_python

_NAMES = {"true": True, "false": False, "null": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_LEADING_ZEROS = re.compile(r"\b0+(?=\d)")


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
            text += yield from _string(reader, char, bool(open_brackets))
            continue
        if char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif char in ")]}" and (not open_brackets or open_brackets.pop() != char):
            raise NotACall
        text += reader.take(1)


def _string(reader: Reader, char: str, is_nested: bool) -> Generator[None, None, str]:
    """Read a string: its text with the quotes. Line breaks, and quotes that models forget to escape, are escaped."""
    start = yield from reader.peek(3)
    if start[:2] == char * 2 and start != char * 3:
        return reader.take(2)
    quote = reader.take(3 if start == char * 3 else 1)
    text = quote
    escapes = {"\n": "\\n", "\0": "\\0", char: f"\\{char}"}
    while not ((yield from reader.has(quote)) and (yield from _ends_string(reader, len(quote), is_nested))):
        two = yield from reader.peek(2)
        if len(two) < 2:
            raise Ended
        piece = reader.take(2 if two[0] == "\\" else 1)
        text += escapes.get(piece, piece)
    return text + reader.take(len(quote))


def _ends_string(reader: Reader, length: int, is_nested: bool) -> Generator[None, None, bool]:
    """Whether what follows a quote can follow a string: in brackets, or as an argument."""
    char, place = yield from _next_char(reader, length)
    if is_nested:
        return char in ("", ",", ":", "]", "}", ")")
    if char == ")":
        after = yield from reader.peek(place + 2)
        return len(after) < place + 2 or after[-1] in ",;]<" or after[-1].isspace()
    if char != ",":
        return char == ""
    char, place = yield from _next_char(reader, place + 1)
    while char.isidentifier() or char.isdigit():
        char, place = yield from _next_char(reader, place + 1)
    return char in ("", "=", ")")


def _next_char(reader: Reader, place: int) -> Generator[None, None, tuple[str, int]]:
    """The first character from there that is no white space, and its place; "": the text ends."""
    while True:
        char = (yield from reader.peek(place + 1))[place:]
        if not char.isspace():
            return char, place
        place += 1


def _evaluated(text: str) -> Any:
    try:
        # Python has no numbers like 07.
        own = text if "'" in text or '"' in text else _LEADING_ZEROS.sub("", text)
        return _value_of(parsed_python(own))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise NotACall from None


def _value_of(node: ast.expr) -> Any:
    """The value that JSON has for a literal. Raises ValueError for what is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # Python keeps the halves of a character that JSON's escapes name one by one.
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value_of(node.operand)
        if isinstance(value, (int, float)):
            return -value
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_value_of(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value_of(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value_of, node.values), strict=True))
    raise ValueError
