"""Calls whose arguments stand one by one between tags."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from vllm.parser.calls import Calls
from vllm.parser.events import Event
from vllm.parser.reader import Ended, NotACall, Reader, Step
from vllm.parser.typed_values import as_json, dumps, in_string, is_text, may_be_text


@dataclass(frozen=True)
class Tags:
    """How an argument is written: `begin` name `name_end` value `end`; `value_begin` stands, after white space, between
    name_end and the value, and before it the type between the two `type_tags`, if there is one. `call_end` ends the
    call. A line break after the name and before the end are none of the value with `on_lines`."""

    begin: str
    name_end: str
    end: str
    call_end: tuple[str, ...]
    value_begin: str = ""
    on_lines: bool = False
    quoted: bool = False  # the name may stand in quotes, with more after them
    text_sign: str = ""  # after the name: the value is a text, if the schema allows one
    type_tags: tuple[str, str] | None = None
    raw: tuple[str, str] | None = None  # what stands between these is the value, whatever it is


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
        said = bool(tags.text_sign) and tags.text_sign in name
        name = re.split("[\"']", name)[1] if tags.quoted and re.search("[\"']", name) else name.strip()
        if tags.value_begin:
            yield from reader.skip_space()
            if tags.type_tags and (yield from reader.skip(tags.type_tags[0])):
                kind, _ = yield from reader.until(tags.type_tags[1])
                said = kind.strip() == "string"
                yield from reader.skip_space()
            yield from reader.expect(tags.value_begin)
        before = ", " if names else "{"
        schema = calls.property_schema(function, name)
        if is_text(schema) or (said and may_be_text(schema)):
            yield calls.arguments(f'{before}{dumps(name)}: "')
            yield from _string(reader, calls, tags)
            yield calls.arguments('"')
        else:
            value = yield from _value(reader, tags)
            yield calls.arguments(f"{before}{dumps(name)}: {as_json(value, schema)}")
        names.add(name)
    yield calls.arguments("}" if names else "{}")
    yield from calls.end()


def invoked_calls(reader: Reader, calls: Calls, begin: str, end: str, tags: Tags) -> Iterator[Step]:
    """Read calls that are `begin`, a name up to ">", and arguments, up to and with `end`."""
    while (yield from reader.close(begin, end)) == begin:
        name, _ = yield from reader.until(">")
        name = name.strip().strip("\"'")
        if "\n" in name:
            raise NotACall
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name, tags)


def _value(reader: Reader, tags: Tags) -> Generator[Step, None, str]:
    if tags.raw and (yield from reader.skip(tags.raw[0])):
        value, _ = yield from reader.until(tags.raw[1])
        yield from reader.close(tags.end)
        return value
    value, _ = yield from reader.until(tags.end)
    return value.removeprefix("\n").removesuffix("\n") if tags.on_lines else value


def _string(reader: Reader, calls: Calls, tags: Tags) -> Iterator[Step]:
    def piece(text: str) -> Iterator[Event]:
        yield calls.arguments(in_string(text))

    if tags.raw and (yield from reader.skip(tags.raw[0])):
        if (yield from reader.text_until((tags.raw[1],), piece, is_part=True)) is None:
            raise Ended
        yield from reader.close(tags.end)
        return
    if tags.on_lines and (yield from reader.peek()) == "\n" and not (yield from reader.has("\n" + tags.end)):
        reader.take(1)
    ends = ("\n" + tags.end, tags.end) if tags.on_lines else (tags.end,)
    if (yield from reader.text_until(ends, piece, is_part=True)) is None:
        raise Ended
