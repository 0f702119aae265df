"""Calls whose arguments are written as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from typing import Any

from vllm.answers.events import Event
from vllm.answers.reader import Ended, NotACall, Reader, Step
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.typed_values import scalars

_ARGUMENTS = ("arguments", "parameters", "args")
_NAMES = ("name", "function", "tool_name")
_BESIDE = ("id", "type", "index", "tool_call_id")


def _value_end(text: str) -> Generator[tuple[int, bool], str, None]:
    """Follows a value of JSON: sent a piece, yields how many of its characters belong to the value, and whether it ends
    there. A marker in the middle of it ends it, too."""
    depth, in_string, is_escaped, is_scalar = 0, False, False, False
    while True:
        count, is_done = len(text), False
        for place, char in enumerate(text):
            if in_string:
                if is_escaped:
                    is_escaped = False
                elif char == "\\":
                    is_escaped = True
                elif char == '"':
                    in_string = False
                    is_done = depth == 0
            elif is_scalar:
                if char in ',:}]"[{' or char.isspace():
                    count, is_done = place, True
                    break
            elif char == '"':
                in_string = True
            elif char == "<":
                count, is_done = place, True
                break
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                is_done = depth <= 0
            elif depth == 0:
                is_scalar = True
            if is_done:
                count = place + 1
                break
        text = yield count, is_done


def json_pieces(reader: Reader, make: Callable[[str], Iterator[Event]]) -> Iterator[Step]:
    """Read one value of JSON and yield what `make` makes of its text, as it comes. Raises NotACall where no value
    begins, Ended where the text ends within it."""
    first = yield from reader.peek()
    if not first:
        raise Ended
    if first not in '{["-0123456789tfn':
        raise NotACall
    scan = _value_end(reader.unread)
    count, is_done = next(scan)
    while True:
        if count:
            yield from make(reader.take(count))
        if is_done:
            return
        if reader.is_ended:
            # A number ends with the text.
            if first in '{["':
                raise Ended
            return
        yield None
        count, is_done = scan.send(reader.unread)


def json_value(reader: Reader) -> Generator[Step, None, str]:
    """Read one value of JSON: its text."""
    pieces: list[str] = []

    def keep(text: str) -> Iterator[Event]:
        pieces.append(text)
        return iter(())

    yield from json_pieces(reader, keep)
    return "".join(pieces)


def parsed_json(text: str) -> Any:
    """The value of a text of JSON. Raises NotACall if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise NotACall from None


def _as_arguments(text: str) -> str:
    """Arguments that were written as a text of JSON, or not at all, as JSON."""
    if text == "null":
        return "{}"
    if text.startswith('"'):
        inner = parsed_json(text)
        return scalars(inner.strip()) or "{}"
    return text


def json_arguments(reader: Reader, calls: Calls) -> Iterator[Step]:
    """Read a call's arguments as they come."""
    first = yield from reader.peek()
    if first in ("{", "["):
        yield from json_pieces(reader, lambda text: iter((calls.arguments(text),)))
    else:
        yield calls.arguments(_as_arguments((yield from json_value(reader))))


def json_object_call(reader: Reader, calls: Calls, needs_arguments: bool = False) -> Iterator[Step]:
    """Read an object with the call's name and its arguments, in any order. Raises NotACall for another object, and
    for one without arguments with `needs_arguments`."""
    yield from _object(reader, calls, needs_arguments)
    if not calls.is_open:
        raise NotACall
    yield from calls.end()


def _object(reader: Reader, calls: Calls, needs_arguments: bool) -> Iterator[Step]:
    yield from reader.expect("{")
    held: str | None = None  # arguments that came before the name
    named: str | None = None  # the name that waits for arguments
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip("}")):
            return
        yield from _expect_key(reader)
        key = parsed_json((yield from json_value(reader)))
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        first = yield from reader.peek()
        if key == "function" and first == "{" and not calls.is_open:
            yield from _object(reader, calls, needs_arguments)
        elif key in _NAMES and not calls.is_open:
            name = parsed_json((yield from json_value(reader)))
            if not isinstance(name, str):
                raise NotACall
            if held is None and needs_arguments:
                named = name
            else:
                yield calls.start(name)
            if held is not None:
                yield calls.arguments(_as_arguments(held))
        elif key in _ARGUMENTS and (calls.is_open or named is not None):
            if not calls.is_open:
                yield calls.start(named or "")
            yield from json_arguments(reader, calls)
        elif key in _ARGUMENTS:
            held = yield from json_value(reader)
        elif key in _BESIDE or calls.is_open:
            yield from json_value(reader)
        else:
            raise NotACall
        yield from reader.skip_space()
        yield from reader.skip(",")


def _expect_key(reader: Reader) -> Iterator[Step]:
    first = yield from reader.peek()
    if not first:
        raise Ended
    if first != '"':
        raise NotACall


def json_calls(reader: Reader, calls: Calls) -> Iterator[Step]:
    """Read an object of a call, or a list of such objects, which may be empty."""
    yield from reader.skip_space()
    if not (yield from reader.skip("[")):
        yield from json_object_call(reader, calls)
        return
    while True:
        yield from reader.skip_space()
        if (yield from reader.skip("]")):
            return
        yield from json_object_call(reader, calls)
        yield from reader.skip_space()
        yield from reader.skip(",")
