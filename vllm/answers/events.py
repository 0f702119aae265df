"""The events that the text of an answer becomes, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str
    kind: ClassVar[str] = "content"


@dataclass(frozen=True)
class Reasoning:
    """Text that the model has written for itself."""

    text: str
    kind: ClassVar[str] = "reasoning"


@dataclass(frozen=True)
class CallStart:
    """A call of a function begins; `index` counts the answer's calls."""

    index: int
    id: str
    name: str
    kind: ClassVar[str] = "call_start"


@dataclass(frozen=True)
class CallArguments:
    """A piece of the call's arguments; all pieces together are a text of JSON."""

    index: int
    text: str
    kind: ClassVar[str] = "call_arguments"


@dataclass(frozen=True)
class CallEnd:
    """The call has all of its arguments, or the answer ends within it."""

    index: int
    kind: ClassVar[str] = "call_end"


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


@dataclass
class ParsedCall:
    """A whole call; `arguments` is a text of JSON, incomplete where the answer was cut."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """A whole answer; None for a part that it does not have."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ParsedCall] = field(default_factory=list)


def as_content(text: str) -> Iterator[Event]:
    """The event of a text for the user."""
    yield Content(text)


def as_reasoning(text: str) -> Iterator[Event]:
    """The event of a text that the model has written for itself."""
    yield Reasoning(text)


def collect(events: Iterable[Event]) -> Answer:
    """The answer that the events make."""
    answer = Answer()
    for event in events:
        if isinstance(event, Content):
            answer.content = (answer.content or "") + event.text
        elif isinstance(event, Reasoning):
            answer.reasoning = (answer.reasoning or "") + event.text
        elif isinstance(event, CallStart):
            answer.calls.append(ParsedCall(event.id, event.name))
        elif isinstance(event, CallArguments):
            answer.calls[event.index].arguments += event.text
    return answer
