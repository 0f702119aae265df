"""Calls whose arguments stand one by one between tags."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from vllm.parser.calls import Calls
from vllm.parser.events import Event
from vllm.parser.reader import Ended, NotACall, Reader, Step
from vllm.parser.typed_values import as_json, dumps, in_string, is_text


@dataclass(frozen=True)
class Tags:
    """How an argument is written: `begin` name `name_end` value `end`; `value_begin` stands, after white space, between
    name_end and the value. `call_end` ends the call. A line break after the name and before the end are none of the
    value with `on_lines`."""

    begin: str
    name_end: str
    end: str
    call_end: tuple[str, ...]
    value_begin: str = ""
    on_lines: bool = False
    quoted: bool = False  # the name may stand in quotes, with more after them
    text_sign: str = ""  # after the name: the value is a text, whatever the schema says


def tag_arguments(reader: Reader, calls: Calls, function: str, tags: Tags) -> Iterator[Step]:
    """Read the arguments up to and with the call's end."""
    names: set[str] = set()
    while True:
        try:
            found = yield from reader.close(tags.begin, *tags.call_end)
        except NotACall:
            # Nothing is missing but the end.
            yield calls.arguments("}" if names else "{}")
            yield from calls.end()
            raise
        if found != tags.begin:
            break
        name, _ = yield from reader.until(tags.name_end)
        is_said_text = bool(tags.text_sign) and tags.text_sign in name
        name = re.split("[\"']", name)[1] if tags.quoted and re.search("[\"']", name) else name.strip()
        if tags.value_begin:
            yield from reader.skip_space()
            yield from reader.expect(tags.value_begin)
        before = ", " if names else "{"
        schema = calls.property_schema(function, name)
        if is_said_text or is_text(schema):
            yield calls.arguments(f'{before}{dumps(name)}: "')
            yield from _string(reader, calls, tags)
            yield calls.arguments('"')
        else:
            value = yield from _value(reader, tags)
            yield calls.arguments(f"{before}{dumps(name)}: {as_json(value, schema)}")
        names.add(name)
    yield calls.arguments("}" if names else "{}")
    yield from calls.end()


def _value(reader: Reader, tags: Tags) -> Generator[Step, None, str]:
    value, _ = yield from reader.until(tags.end)
    return value.removeprefix("\n").removesuffix("\n") if tags.on_lines else value


def _string(reader: Reader, calls: Calls, tags: Tags) -> Iterator[Step]:
    def piece(text: str) -> Iterator[Event]:
        yield calls.arguments(in_string(text))

    if tags.on_lines and (yield from reader.peek()) == "\n" and not (yield from reader.has("\n" + tags.end)):
        reader.take(1)
    ends = ("\n" + tags.end, tags.end) if tags.on_lines else (tags.end,)
    if (yield from reader.text_until(ends, piece, is_part=True)) is None:
        raise Ended
