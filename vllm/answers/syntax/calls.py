"""Calls of functions in a text: where they begin, and what becomes of a text that is none."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from vllm.answers.events import CallArguments, CallEnd, CallStart, Content, Event
from vllm.answers.reader import BROKEN, NotACall, Reader, Step
from vllm.answers.syntax.schemas import ArgumentSchema
from vllm.answers.syntax.typed_values import whole_characters


def random_id(name: str, index: int) -> str:
    """An id of a call that the model gives none."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class Calls:
    """An answer's calls so far; makes their events."""

    def __init__(
        self,
        reader: Reader,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        make_id: Callable[[str, int], str] = random_id,
    ) -> None:
        """
        Args:
            schemas: by function, the JSON schema of its arguments.
            make_id: a call's id, of its function and its index.
        """
        self._reader = reader
        self._make_id = make_id
        self.schemas = schemas or {}
        self._read: dict[str, ArgumentSchema] = {}
        self.count = 0
        self.is_open = False
        self._is_empty = True

    def start(self, name: str, call_id: str | None = None) -> Event:
        """A call begins. Raises NotACall without a name."""
        name = whole_characters(name.strip())
        if not name:
            raise NotACall
        self.is_open = self._is_empty = True
        self.count += 1
        return CallStart(self.count - 1, call_id or self._make_id(name, self.count - 1), name)

    def arguments(self, text: str) -> Event:
        """A piece of its arguments."""
        self._is_empty = self._is_empty and not text
        return CallArguments(self.count - 1, text)

    def end(self, is_cut: bool = False) -> Iterator[Event]:
        """It has ended; one without arguments gets an empty object, unless the text was cut within it."""
        if not self.is_open:
            return
        if self._is_empty and not is_cut:
            yield self.arguments("{}")
        self.is_open = False
        self._reader.mark()
        yield CallEnd(self.count - 1)

    def offered(self, name: str) -> str:
        """The name of a function that is offered, where a model has written it twice: `f.f`."""
        half, _, rest = name.partition(".")
        return half if half == rest and name not in self.schemas and half in self.schemas else name

    def schema(self, function: str) -> ArgumentSchema:
        """The schema of the function's arguments, which may say nothing."""
        if function not in self._read:
            self._read[function] = ArgumentSchema(self.schemas.get(function, {}))
        return self._read[function]

    def has_argument(self, function: str, name: str) -> bool:
        """Whether the function has such an argument, as far as that is known."""
        names = self.schema(function).property_names
        return not names or name in names


def argument_schemas(tools: list[dict[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The schemas of the functions' arguments, from tools as chat has them, or responses."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    functions = [each for each in functions if isinstance(each, Mapping)]
    return {str(each.get("name")): each.get("parameters") or {} for each in functions}


class _Text:
    """Content beside calls, without the white space that only parts it from them."""

    def __init__(self) -> None:
        self._space = ""
        self._has_text = False
        self._is_after_call = False

    def add(self, text: str) -> Iterator[Event]:
        text = self._space + text
        if self._is_after_call and not self._has_text:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._has_text = True
            self._is_after_call = False
            yield Content(body)

    def frame(self) -> None:
        """Markup that is no text: white space before the first text only parts it from that."""
        self._space = self._space if self._has_text else ""

    def call(self) -> None:
        self._space, self._is_after_call = "", True

    def end(self) -> Iterator[Event]:
        if self._space and not self._is_after_call:
            yield Content(self._space)
        self._space = ""


ReadCalls = Callable[[Reader, Calls, str], Iterator[Step]]
"""Reads the call or calls that follow a marker."""


def content_and_calls(
    reader: Reader,
    calls: Calls,
    markers: tuple[str, ...],
    read: ReadCalls,
    at_start: tuple[str, ...] = (),
    left: tuple[str, ...] = (),
    frames: tuple[str, ...] = (),
) -> Iterator[Step]:
    """Content up to one of `markers`, or of `at_start` where the answer begins, then what `read` reads, and so on. What
    is not a call is content. `left`: markers that `read` finds unread, as it does those of `at_start`. `frames`: markup
    of the content, which is left out."""
    markers += (*left, *frames)
    text = _Text()
    marker, is_read, leading = yield from _first_marker(reader, markers, at_start, text)
    while marker is not None:
        if marker in frames:
            text.frame()
            reader.mark()
            marker = yield from reader.text_until(markers, text.add)
            continue
        if is_read and marker in left:
            reader.untake()
            is_read = False
        reader.mark()
        count = calls.count
        try:
            for step in read(reader, calls, marker):
                if isinstance(step, CallStart):
                    text.call()
                yield step
            yield from calls.end()
        except BROKEN:
            if calls.is_open:
                # The part of it that was read is its arguments.
                yield from calls.end(is_cut=True)
            else:
                reader.put_back(reader.since_mark())
                if calls.count == count:
                    yield from text.add(marker if is_read else leading + reader.take(len(marker)))
        is_read, leading = True, ""
        reader.mark()
        marker = yield from reader.text_until(markers, text.add)
    yield from text.end()


def framed_content(reader: Reader, frames: tuple[str, ...]) -> Iterator[Step]:
    """Content without the markup around it."""
    text = _Text()
    while (yield from reader.text_until(frames, text.add)) is not None:
        text.frame()
    yield from text.end()


def _first_marker(
    reader: Reader, markers: tuple[str, ...], at_start: tuple[str, ...], text: _Text
) -> Generator[Step, None, tuple[str | None, bool, str]]:
    """The first marker, whether it is read already, and the white space before it that is in no event."""
    if at_start:
        reader.mark()
        yield from reader.skip_space()
        leading = reader.since_mark()
        marker = yield from reader.has(*at_start, *markers)
        if marker in at_start:
            return marker, False, leading
        yield from text.add(leading)
    return (yield from reader.text_until(markers, text.add)), True, ""
