"""Calls that are written as Python: name(argument=value, ...)."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Generator, Iterator

from vllm.answers.reader import Ended, NotACall, Reader, Step
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.typed_values import dumps, json_object, parsed_python, read_json, whole_characters

_NAMES = {"true": "true", "false": "false", "null": "null"}
_NO_NUMBERS = ("nan", "inf", "infinity")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=\d)")
_JSON_NUMBER = re.compile(r"(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
# Python says no more of a value than that it is too long, or nested too deeply.
_MOST_DIGITS, _MOST_BRACKETS = re.compile(r"\d{4000}"), 80
_IN_NAMES = "_-.$@:"  # beside letters and digits, of names that are not known


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
    return char.isidentifier() or char.isdecimal()


def python_call(reader: Reader, calls: Calls) -> Iterator[Step]:
    """Read one call; its events come when all of it is read."""
    name = yield from _name(reader, "(", calls.schemas)
    known = calls.schema(name).property_names
    arguments: dict[str, str] = {}
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip(")")):
            break
        if (yield from reader.skip("**")):
            # Python's own way to write names that are none of its own.
            arguments |= _entries((yield from _value(reader, known)))
        else:
            key = yield from _name(reader, "=", known)
            arguments[key] = _evaluated((yield from _value(reader, known)))
        if not (yield from reader.skip(",")):
            yield from reader.expect(")")
            break
    yield calls.start(name)
    yield calls.arguments(json_object(arguments))
    yield from calls.end()


def _name(reader: Reader, end: str, known: Collection[str]) -> Generator[None, None, str]:
    """Read a name, and `end` after it. Those that are `known` may have any characters."""
    if found := (yield from reader.skip(*(f"{each}{end}" for each in known))):
        return found.removesuffix(end)
    name = ""
    while True:
        char = yield from reader.peek()
        if not char:
            raise Ended
        if not _is_of_name(char):
            break
        name += reader.take(1)
    yield from reader.skip_space()
    yield from reader.expect(end)
    if not name or name[0] in "-.:":
        raise NotACall
    return name


def _is_of_name(char: str) -> bool:
    return char != "" and (char in _IN_NAMES or char.isalnum() or f"a{char}".isidentifier())


def _value(reader: Reader, known: Collection[str]) -> Generator[None, None, str]:
    """Read an expression up to the comma or bracket after it. `known`: names of arguments."""
    open_brackets: list[str] = []
    text = ""
    while True:
        char = yield from reader.peek()
        if not char:
            raise Ended
        if not open_brackets and char in ",)":
            return text
        if char in "\"'":
            text += yield from _string(reader, char, bool(open_brackets), known)
            continue
        if char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif char in ")]}" and (not open_brackets or open_brackets.pop() != char):
            raise NotACall
        text += reader.take(1)


def _string(reader: Reader, char: str, is_nested: bool, known: Collection[str]) -> Generator[None, None, str]:
    """Read a string: its text with the quotes. Line breaks, and quotes that models forget to escape, are escaped."""
    start = yield from reader.peek(3)
    if start[:2] == char * 2 and start != char * 3:
        return reader.take(2)
    quote = reader.take(3 if start == char * 3 else 1)
    text = quote
    escapes = {"\n": "\\n", "\0": "\\0", char: f"\\{char}"}
    while not ((yield from reader.has(quote)) and (yield from _ends_string(reader, len(quote), is_nested, known))):
        two = yield from reader.peek(2)
        if len(two) < 2:
            raise Ended
        piece = reader.take(2 if two[0] == "\\" else 1)
        text += escapes.get(piece, piece)
    return text + reader.take(len(quote))


def _ends_string(reader: Reader, length: int, is_nested: bool, known: Collection[str]) -> Generator[None, None, bool]:
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
    for each in known:
        if (yield from reader.peek(place + len(each) + 1))[place:] == f"{each}=":
            return True
    if char == "*":
        return (yield from reader.peek(place + 3))[place:] == "**{"
    start = place
    while _is_of_name(char):
        place += 1
        char = (yield from reader.peek(place + 1))[place:]
    char, place = yield from _next_char(reader, place)
    return char in ("", ")") or (char == "=" and place > start)


def _next_char(reader: Reader, place: int) -> Generator[None, None, tuple[str, int]]:
    """The first character from there that is no white space, and its place; "": the text ends."""
    while True:
        char = (yield from reader.peek(place + 1))[place:]
        if not char.isspace():
            return char, place
        place += 1


def _evaluated(text: str) -> str:
    """The value of an expression, as JSON."""
    # Python has no numbers like 07.
    own = (text if "'" in text or '"' in text else _LEADING_ZEROS.sub("", text)).strip()
    try:
        return _json_of(parsed_python(own), own)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        pass
    try:
        return read_json(own)[0]
    except (ValueError, RecursionError):
        pass
    if _MOST_DIGITS.search(own) or sum(map(own.count, _CLOSING)) > _MOST_BRACKETS:
        return dumps(own)
    raise NotACall


def _entries(text: str) -> dict[str, str]:
    """Arguments that an object has."""
    try:
        node = parsed_python(text)
        if not isinstance(node, ast.Dict):
            raise NotACall
        return _entries_of(node, text.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise NotACall from None


def _entries_of(node: ast.Dict, source: str) -> dict[str, str]:
    keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
    if not all(isinstance(key, str) for key in keys):
        raise ValueError
    values = (_json_of(each, source) for each in node.values)
    return dict(zip(map(whole_characters, map(str, keys)), values, strict=True))


def _json_of(node: ast.expr, source: str) -> str:
    """A literal as JSON, and what JSON or Python cannot say as it is written. Raises ValueError for what is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # Python keeps the halves of a character that JSON's escapes name one by one.
        return dumps(whole_characters(node.value))
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, bool, type(None))):
        try:
            if not isinstance(node.value, float) or math.isfinite(node.value):
                return dumps(node.value)
        except ValueError:
            pass
        written = ast.get_source_segment(source, node) or ""
        return written if _JSON_NUMBER.fullmatch(written) else dumps(written)
    if isinstance(node, ast.Name) and (node.id in _NAMES or node.id.lower() in _NO_NUMBERS):
        return _NAMES.get(node.id) or dumps(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _json_of(node.operand, source)
        if value.startswith("-"):
            return value[1:]
        if value[0].isdecimal():
            return f"-{value}"
        if value.startswith('"') and not (
            isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, str)
        ):
            return f'"-{value[1:]}'
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return f"[{', '.join(_json_of(each, source) for each in node.elts)}]"
    if isinstance(node, ast.Dict):
        return json_object(_entries_of(node, source))
    raise ValueError
