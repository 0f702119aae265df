"""Where the content of an answer stands in its text, as it comes: there stop strings are looked for."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.answers.answer import AnswerParser
from vllm.answers.events import Content
from vllm.logger import init_logger

logger = init_logger(__name__)


class ContentPlaces:
    """A `ContentReader` of stop strings (vllm/v1/engine/stop_strings.py), by the parser of the answer's parts."""

    def __init__(self, parser: AnswerParser) -> None:
        self.num_read = 0
        self._parser = parser
        self._text = ""
        self._end = 0  # of the last content
        self._is_broken = False

    def ends_a_part(self, stop: str) -> bool:
        """See ContentReader: what stands behind a call's arguments, as agents stop at."""
        return any(letter.isalpha() for letter in stop) and stop in self._parser.call_end

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[tuple[int, int]]:
        """See ContentReader."""
        return self._taken(text, token_ids, is_last=False)

    def finish(self) -> list[tuple[int, int]]:
        """See ContentReader."""
        return self._taken("", (), is_last=True)

    def _taken(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[tuple[int, int]]:
        before = len(self._text)
        self._text += text
        if not self._is_broken:
            try:
                events = self._parser.finish() if is_last else self._parser.feed(text, token_ids)
            except Exception:  # others' parsers; the answer's own says so
                logger.exception("a parser fails: stop strings are looked for in all that follows")
                self._is_broken = True
        if self._is_broken:
            self.num_read = len(self._text)
            return [(before, len(self._text))] if text else []
        contents = [event.text for event in events if isinstance(event, Content)]
        ends = self._parser.content_ends
        self.num_read = len(self._text) if is_last or ends is None else self._parser.num_read
        found = [
            self._found(each) if ends is None else self._ending(each, ends[index])
            for index, each in enumerate(contents)
        ]
        return [(start, end) for start, end in found if start < end]

    def _ending(self, content: str, end: int) -> tuple[int, int]:
        """Where a content stands that ends there, as far as it is of the text: parsers may put something before it."""
        start = end
        while start > max(self._end, end - len(content)) and self._text[start - 1] == content[start - end - 1]:
            start -= 1
        self._end = end
        return start, end

    def _found(self, content: str) -> tuple[int, int]:
        """Where a content stands whose parser does not say it: the last such text."""
        start = self._text.rfind(content, self._end)
        if start >= 0:
            self._end = start + len(content)
        return start, start + len(content) if start >= 0 else start
