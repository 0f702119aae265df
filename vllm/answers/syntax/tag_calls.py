"""Calls whose arguments stand one by one between tags."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from vllm.answers.events import Event
from vllm.answers.reader import Ended, NotACall, Reader, Step
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.schemas import ArgumentSchema
from vllm.answers.syntax.typed_values import as_json, dumps, in_string

_OBJECT = ArgumentSchema({"type": "object"})
_ALL = ("arguments", "parameters", "properties", "input")


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
    may_be_open: bool = False  # `begin` on a new line ends a value, too
    quoted: bool = False  # the name may stand in quotes, with more after them
    text_sign: str = ""  # after the name: the value is a text, if the schema allows one
    type_tags: tuple[str, str] | None = None
    raw: tuple[str, str] | None = None  # what stands between these is the value, whatever it is
    is_escaped: bool = False  # names are attributes, in which & and quotes are written as entities
    also_begin: tuple[str, ...] = ()  # other ways to write `begin`


def tag_arguments(reader: Reader, calls: Calls, function: str, tags: Tags) -> Iterator[Step]:
    """Read the arguments up to and with the call's end. A single one that is called like all of them, and
    that the function does not have, is the object of all."""
    names: set[str] = set()
    while True:
        try:
            found = yield from reader.close(tags.begin, *tags.also_begin, *tags.call_end)
        except NotACall:
            # Nothing is missing but the end.
            yield calls.arguments("}" if names else "{}")
            yield from calls.end()
            raise
        if found in tags.call_end:
            break
        name, _ = yield from reader.until(tags.name_end)
        said = bool(tags.text_sign) and tags.text_sign in name
        name = re.split("[\"']", name)[1] if tags.quoted and re.search("[\"']", name) else name.strip()
        name = html.unescape(name) if tags.is_escaped else name
        if tags.value_begin:
            yield from reader.skip_space()
            if tags.type_tags and (yield from reader.skip(tags.type_tags[0])):
                kind, _ = yield from reader.until(tags.type_tags[1])
                said = kind.strip() == "string"
                yield from reader.skip_space()
            yield from reader.expect(tags.value_begin)
        if not names and name in _ALL and not calls.has_argument(function, name):
            value = yield from _value(reader, tags)
            if (yield from _is_all(reader, calls, value, tags)):
                return
            yield calls.arguments(f"{{{dumps(name)}: {as_json(value)}")
            names.add(name)
            continue
        before = ", " if names else "{"
        schema = calls.schema(function).property(name)
        if schema.is_text or (said and schema.may_be_text):
            yield calls.arguments(f'{before}{dumps(name)}: "')
            yield from _string(reader, calls, tags)
            yield calls.arguments('"')
        else:
            value = yield from _value(reader, tags)
            yield calls.arguments(f"{before}{dumps(name)}: {as_json(value, schema)}")
        names.add(name)
    yield calls.arguments("}" if names else "{}")
    yield from calls.end()


def invoked_calls(
    reader: Reader, calls: Calls, begin: str, end: str, tags: Tags, rename: Callable[[str], str] = str
) -> Iterator[Step]:
    """Read calls that are `begin`, a name up to ">", and arguments, up to and with `end`."""
    while (yield from reader.close(begin, end)) == begin:
        name, _ = yield from reader.until(">")
        name = rename(name.strip().strip("\"'"))
        if "\n" in name:
            raise NotACall
        yield calls.start(name)
        yield from tag_arguments(reader, calls, name, tags)


def _is_all(reader: Reader, calls: Calls, value: str, tags: Tags) -> Generator[Step, None, bool]:
    """Read the call's end, if the value is an object and nothing follows it."""
    written = as_json(value, _OBJECT)
    if not written.startswith("{"):
        return False
    try:
        yield from reader.close(*tags.call_end)
    except NotACall:
        return False
    except Ended:
        yield calls.arguments(written)
        raise
    yield calls.arguments(written)
    yield from calls.end()
    return True


def _value(reader: Reader, tags: Tags) -> Generator[Step, None, str]:
    if tags.raw and (yield from reader.skip(tags.raw[0])):
        value, _ = yield from reader.until(tags.raw[1])
        yield from reader.close(tags.end)
        return value
    value, found = yield from reader.until(*_ends_of(tags))
    if found != tags.end:
        reader.untake()
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
    ends = ("\n" + tags.end, *_ends_of(tags)) if tags.on_lines else _ends_of(tags)
    found = yield from reader.text_until(ends, piece, is_part=True)
    if found is None:
        raise Ended
    if found.strip() == tags.begin:
        reader.untake()


def _ends_of(tags: Tags) -> tuple[str, ...]:
    """The ends of a value: models leave its own end out at times where arguments are lines."""
    return (tags.end, "\n" + tags.begin) if tags.may_be_open else (tags.end,)
