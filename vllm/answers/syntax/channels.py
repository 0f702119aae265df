"""Messages in channels, as gpt-oss writes its answers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllm.answers.events import Content, as_content, as_reasoning
from vllm.answers.reader import Ended, Reader, Step
from vllm.answers.syntax.calls import Calls

START, CHANNEL, MESSAGE, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
END, RETURN = "<|end|>", "<|return|>"
_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def read_harmony(reader: Reader, calls: Calls) -> Iterator[Step]:
    """Read a whole answer: messages to functions are calls, those of the channel `final`, and remarks beside calls, are
    content, all others reasoning. A text without channels is content."""
    if not (yield from reader.has(START, CHANNEL, "<|")):
        yield from reader.text_until((START, CHANNEL), as_content)
    while True:
        yield from reader.skip_space()
        if not (yield from reader.peek()):
            return
        try:
            header, _ = yield from reader.until(MESSAGE)
        except Ended:
            # The beginning of a header is markup; another text is for the user.
            rest = reader.take(len(reader.unread))
            if START not in rest and CHANNEL not in rest:
                yield Content(rest)
            return
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].split()[:1]
        name = recipient[1] if recipient else ""
        if name.startswith(_FUNCTIONS) and name != _FUNCTIONS:
            yield calls.start(name.removeprefix(_FUNCTIONS))
            end = yield from reader.text_until(_ENDS, lambda text: iter((calls.arguments(text),)), is_part=True)
            yield from calls.end(is_cut=end is None)
        else:
            is_content = channel in (["final"], ["commentary"]) and not name
            # Markers are single tokens: the beginning of one at the end is text.
            yield from reader.text_until(_ENDS, as_content if is_content else as_reasoning)
