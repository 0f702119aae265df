"""Messages to recipients, as Muse writes its answers: to itself, to the user, to functions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllm.parser.calls import Calls
from vllm.parser.events import Content, Event, Reasoning
from vllm.parser.reader import Ended, NotACall, Reader, Step
from vllm.parser.tag_calls import Tags, invoked_calls

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|eom|>", "<|eot|>", START)
SECTION, SECTION_END = "<atem:function_calls>", "</atem:function_calls>"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(r"(<\|start\|>)?(assistant)?\s*(to=\S*)?")
_TAGS = Tags("<atem:parameter name=", ">", "</atem:parameter>", ("</atem:invoke>",), quoted=True)


def read_messages(reader: Reader, calls: Calls) -> Iterator[Step]:
    """Read a whole answer: messages to `user` and `commentary` are content, to `self` and to none reasoning, those to
    `developer` are left out, and others hold calls. A text without messages is content."""
    yield from reader.skip_space()
    if not (yield from reader.has(START, MESSAGE, "to=")):
        reader.put_back(reader.since_mark())
        yield from reader.text_until((START,), _content)
    while True:
        reader.mark()
        yield from reader.skip_space()
        if not (yield from reader.peek()):
            return
        try:
            header, _ = yield from reader.until(MESSAGE)
        except Ended:
            # The beginning of a header is markup; another text is for the user.
            rest = reader.take(len(reader.unread))
            if not _HEADER.fullmatch(rest):
                yield Content(rest)
            return
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else "self"
        if recipient in ("self", "developer"):
            yield from reader.text_until(ENDS, _reasoning if recipient == "self" else _nothing)
        elif recipient in ("user", "commentary"):
            yield from reader.text_until(ENDS, _content)
        else:
            yield from _calls(reader, calls)


def _calls(reader: Reader, calls: Calls) -> Iterator[Step]:
    """The body of a message to a function; what is no call is content."""
    reader.mark()
    try:
        yield from reader.close(SECTION)
        yield from invoked_calls(reader, calls, "<atem:invoke name=", SECTION_END, _TAGS)
    except (NotACall, Ended):
        if calls.is_open:
            yield from calls.end(is_cut=True)
        else:
            reader.put_back(reader.since_mark())
    yield from reader.skip_space()
    yield from reader.text_until(ENDS, _content)


def _content(text: str) -> Iterator[Event]:
    yield Content(text)


def _reasoning(text: str) -> Iterator[Event]:
    yield Reasoning(text)


def _nothing(text: str) -> Iterator[Event]:
    return iter(())
