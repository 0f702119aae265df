"""The machine that runs parsers: a text that comes in pieces, and generators that read it.

A parser is a generator over a Reader. It yields events, and None where it needs more text; then it goes on with the
next piece. So it is written as if the text were there: what may still become a marker is held back by the reads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from vllm.answers.events import Content, Event

Step = Event | None
"""Parsers yield it; None: more text, please."""


class NotACall(Exception):
    """The text is not what the parser expected."""


class Ended(Exception):
    """The text ends within what the parser reads."""


BROKEN = (NotACall, Ended, RecursionError)
"""Raised by parsers for a text that is not what they expect, or that is nested too deeply."""


class Reader:
    """The unread text, and what was read since the last mark."""

    def __init__(self) -> None:
        self.unread = ""
        self.is_ended = False
        self._num_fed = 0
        self.trailing_space = 0
        """How much white space what was taken last ends with."""
        self._read: list[str] = []

    def feed(self, text: str) -> None:
        """More text."""
        self.unread += text
        self._num_fed += len(text)

    @property
    def place(self) -> int:
        """How many characters of the text are read."""
        return self._num_fed - len(self.unread)

    def mark(self) -> None:
        """Forget what was read so far."""
        self._read.clear()

    def since_mark(self) -> str:
        """The text that was read since the last mark."""
        return "".join(self._read)

    def put_back(self, text: str) -> None:
        """Let `text` be read next, and mark."""
        self.unread = text + self.unread
        self.trailing_space = 0
        self._read.clear()

    def take(self, count: int) -> str:
        """Read so many characters of the unread text."""
        taken, self.unread = self.unread[:count], self.unread[count:]
        self._read.append(taken)
        self.trailing_space = len(taken) - len(taken.rstrip())
        return taken

    def untake(self) -> None:
        """Let what was read last be read next."""
        self.unread = self._read.pop() + self.unread

    def more(self) -> Iterator[None]:
        """Wait for more text. Raises Ended if there is none."""
        if self.is_ended:
            raise Ended
        yield None

    def peek(self, count: int = 1) -> Generator[None, None, str]:
        """The next characters; fewer at the text's end."""
        while len(self.unread) < count and not self.is_ended:
            yield None
        return self.unread[:count]

    def skip_space(self) -> Iterator[None]:
        """Read white space."""
        while True:
            rest = self.unread.lstrip()
            if count := len(self.unread) - len(rest):
                self.take(count)
            if rest or self.is_ended:
                return
            yield None

    def has(self, *markers: str) -> Generator[None, None, str | None]:
        """The one of `markers`, the longest of several, that the unread text begins with; None: none of them."""
        while True:
            ahead = self.unread
            is_open = not self.is_ended and any(len(m) > len(ahead) and m.startswith(ahead) for m in markers)
            if not is_open:
                return max((m for m in markers if ahead.startswith(m)), key=len, default=None)
            yield None

    def skip(self, *markers: str) -> Generator[None, None, str | None]:
        """Read the one of `markers` that comes next, if any."""
        found = yield from self.has(*markers)
        if found:
            self.take(len(found))
        return found

    def expect(self, *markers: str) -> Generator[None, None, str]:
        """Read one of `markers`. Raises NotACall if another text comes, Ended if none does."""
        found = yield from self.skip(*markers)
        if found is None:
            raise Ended if self.is_ended and any(m.startswith(self.unread) for m in markers) else NotACall
        return found

    def close(self, *markers: str) -> Generator[None, None, str]:
        """`expect`, after white space, of what only ends a call: its beginning at the text's end is dropped."""
        yield from self.skip_space()
        try:
            return (yield from self.expect(*markers))
        except Ended:
            self.unread = ""
            self.mark()
            raise

    def until(self, *markers: str) -> Generator[None, None, tuple[str, str]]:
        """Read up to and with the first of `markers`: the text before it, and the marker. Raises Ended without one."""
        start, longest = 0, max(map(len, markers))
        while True:
            found = _first(self.unread, markers, start)
            if found is not None:
                place, marker = found
                return self.take(place), self.take(len(marker))
            start = max(len(self.unread) - longest + 1, 0)
            yield from self.more()

    def skip_end(self, *markers: str) -> Iterator[None]:
        """Read one of `markers` that may come after white space, which stays unread if none does."""
        self.mark()
        yield from self.skip_space()
        if not (yield from self.skip(*markers)):
            self.put_back(self.since_mark())

    def text_until(
        self, markers: Sequence[str], make: Callable[[str], Iterator[Event]], is_part: bool = False
    ) -> Generator[Step, None, str | None]:
        """Read up to and with the first of `markers`, which is returned, and yield what `make` makes of the text before
        it, as it comes; None: the text has ended. `is_part`: the beginning of a marker at the text's end is dropped."""
        while True:
            found = _first(self.unread, markers, 0) if markers else None
            if found is not None:
                place, marker = found
                if place:
                    yield from make(self.take(place))
                return self.take(len(marker))
            is_whole = self.is_ended and not is_part
            count = len(self.unread) - (0 if is_whole else longest_beginning(self.unread, markers))
            if count:
                yield from make(self.take(count))
            if self.is_ended:
                self.unread = ""
                return None
            yield None


def _first(text: str, markers: Sequence[str], start: int) -> tuple[int, str] | None:
    """Where the first of `markers` is, and which; of two at one place the longer."""
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker, start)) >= 0]
    if not found:
        return None
    place, _, marker = min(found)
    return place, marker


def longest_beginning(text: str, markers: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of one of `markers`."""
    for count in range(min(max(map(len, markers), default=0) - 1, len(text)), 0, -1):
        end = text[-count:]
        if any(marker.startswith(end) for marker in markers if len(marker) > count):
            return count
    return 0


class Machine:
    """Runs a parser over a text that comes in pieces."""

    def __init__(self, parser: Callable[[Reader], Iterator[Step]]) -> None:
        self._reader = Reader()
        self._steps = parser(self._reader)
        self.places: list[int] = []
        """How many characters had been read when each of the last events came, without white space that is kept
        back of a text."""

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece."""
        self._reader.feed(text)
        return self._run()

    def finish(self) -> list[Event]:
        """The last events."""
        self._reader.is_ended = True
        return self._run()

    def _run(self) -> list[Event]:
        events = []
        self.places = []
        for event in self._steps:
            if event is None:
                break
            if getattr(event, "text", None) == "":
                continue
            events.append(event)
            self.places.append(self._place_of(event))
        return events

    def _place_of(self, event: Event) -> int:
        is_trimmed = isinstance(event, Content) and not event.text[-1:].isspace()
        return self._reader.place - (self._reader.trailing_space if is_trimmed else 0)
