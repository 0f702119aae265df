"""Texts of answers through the parsers: whole, in every piece, and cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

from vllm.answers.answer import AnswerFormat, AnswerParser
from vllm.answers.events import Answer, CallArguments, CallEnd, CallStart, Event, collect

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "place": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def _events(form: AnswerFormat, pieces: list[str], **options: Any) -> list[Event]:
    parser = AnswerParser(form, None, TOOLS, **options)
    # A delta may be empty.
    events = [event for piece in (*pieces, "") for event in parser.feed(piece)] + parser.finish()
    _check_order(events)
    return events


def _check_order(events: list[Event]) -> None:
    """A call's events come together: start, arguments, end."""
    is_open, count = False, 0
    for event in events:
        if isinstance(event, CallStart):
            assert not is_open and event.index == count and event.id and event.name
            is_open, count = True, count + 1
        elif isinstance(event, (CallArguments, CallEnd)):
            assert is_open and event.index == count - 1
            is_open = isinstance(event, CallArguments)
        else:
            assert event.text
    assert not is_open


def parts(answer: Answer) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """Reasoning, content, and each call's name and arguments, as written."""
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.calls]


def parse(
    text: str, tools: str | None = None, reasoning: str | None = None, **options: Any
) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    """Reasoning, content and calls (name, arguments as objects, or as a text where they are no JSON) of a text: whole,
    by characters, and in two pieces cut at every place, which must all be the same."""
    form = AnswerFormat.of(None, tools, reasoning)
    whole = parts(collect(_events(form, [text], **options)))
    assert parts(collect(_events(form, list(text), **options))) == whole
    for place in range(1, len(text)):
        assert parts(collect(_events(form, [text[:place], text[place:]], **options))) == whole, place
    return whole[0], whole[1], [(name, _loaded(arguments)) for name, arguments in whole[2]]


def parse_by_characters(text: str, tools: str | None = None, reasoning: str | None = None) -> None:
    """A text by characters gives what it does as a whole."""
    form = AnswerFormat.of(None, tools, reasoning)
    assert parts(collect(_events(form, list(text)))) == parts(collect(_events(form, [text])))


def parse_cut(text: str, tools: str | None = None, reasoning: str | None = None, **options: Any) -> None:
    """Every beginning of a text is an answer, too: nothing is raised, whole and by characters are the same, and no
    complete call is lost or invented."""
    form = AnswerFormat.of(None, tools, reasoning)
    full = collect(_events(form, [text], **options))
    for place in range(len(text)):
        cut = collect(_events(form, [text[:place]], **options))
        assert parts(cut) == parts(collect(_events(form, list(text[:place]), **options)))
        for own, whole in itertools.zip_longest(cut.calls, full.calls):
            if own is None:
                break
            assert own.name == whole.name
            assert whole.arguments.startswith(own.arguments)


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
