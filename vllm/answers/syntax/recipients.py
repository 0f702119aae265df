"""Messages to recipients, as Muse writes its answers: to itself, to the user, to functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator

from vllm.answers.events import Content, Event, as_content, as_reasoning
from vllm.answers.reader import BROKEN, Ended, Reader, Step
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.tag_calls import Tags, invoked_calls

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
        yield from reader.text_until((START,), as_content)
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
        recipient: str | None = found[1] if found else "self"
        while recipient is not None:
            if recipient not in _TEXTS:
                yield from _calls(reader, calls)
            recipient = yield from _text(reader, _TEXTS.get(recipient, as_content))


def _calls(reader: Reader, calls: Calls) -> Iterator[Step]:
    """The calls in a message to a function; what is none is left unread."""
    reader.mark()
    try:
        yield from reader.close(SECTION)
        yield from invoked_calls(reader, calls, "<atem:invoke name=", SECTION_END, _TAGS, calls.offered)
    except BROKEN:
        if calls.is_open:
            yield from calls.end(is_cut=True)
        else:
            reader.put_back(reader.since_mark())
    yield from reader.skip_space()


def _text(reader: Reader, make: Callable[[str], Iterator[Event]]) -> Generator[Step, None, str | None]:
    """A message's text; the recipient of the next one, where models leave out the end of this."""
    while (yield from reader.text_until((*ENDS, "to="), make)) == "to=":
        recipient = ""
        while (char := (yield from reader.peek())) and not char.isspace() and char != "<":
            recipient += reader.take(1)
        if (yield from reader.skip(MESSAGE)):
            return recipient
        yield from make(f"to={recipient}")
    return None


def _nothing(text: str) -> Iterator[Event]:
    return iter(())


_TEXTS = {
    "self": as_reasoning,
    "user": as_content,
    "commentary": as_content,
    "developer": _nothing,
}
