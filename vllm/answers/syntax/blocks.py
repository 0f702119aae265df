"""Blocks that say what they hold, as Inkling writes its answers."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.answers.events import Content, as_content, as_reasoning
from vllm.answers.reader import BROKEN, Ended, Reader, Step
from vllm.answers.syntax.calls import Calls
from vllm.answers.syntax.json_calls import json_calls

START, END = "<|message_model|>", "<|end_message|>"
TEXT, THOUGHTS, CALL = "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"
ENDS = (END, "<|content_model_end_sampling|>", START)
_MARKERS = (TEXT, THOUGHTS, CALL, *ENDS)


def read_blocks(reader: Reader, calls: Calls) -> Iterator[Step]:
    """Read a whole answer. A text outside of blocks is content."""
    found = yield from reader.text_until(_MARKERS, as_content)
    while found is not None:
        if found == START:
            # The name of a function may stand here, which the call has, too.
            try:
                header, found = yield from reader.until(*_MARKERS)
            except Ended:
                found = yield from reader.text_until((), as_content)
                continue
            if header.strip() and found != CALL:
                yield Content(header)
        elif found in (TEXT, THOUGHTS):
            found = yield from reader.text_until(ENDS, as_content if found == TEXT else as_reasoning)
        else:
            if found == CALL:
                yield from _call(reader, calls)
            found = yield from reader.text_until(_MARKERS, as_content)


def _call(reader: Reader, calls: Calls) -> Iterator[Step]:
    """A call; another text is left unread."""
    reader.mark()
    try:
        yield from json_calls(reader, calls)
        yield from reader.skip_space()
    except BROKEN:
        if calls.is_open:
            yield from calls.end(is_cut=True)
        else:
            reader.put_back(reader.since_mark())
