"""Incremental detokenisation: whole characters only, stop strings found as they appear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence. What may be the start of a stop string is held back from streams."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        content: ContentReader | None = None,
    ) -> None:
        """A character that `prompt_ids` leave unfinished begins the text. With `content`, stop strings are looked for
        in what it says is content."""
        self._stream = tokenizer.decode_stream(
            params.skip_special_tokens, params.spaces_between_special_tokens, prompt_ids
        )
        self._params = params
        self._stop: list[str] = list(params.stop or [])
        self._num_tokens = 0
        self._pending_ids: list[int] = []
        self._num_sent = 0
        self.text = ""
        self._content = content
        self._markup = [] if content is None else [each for each in self._stop if content.ends_a_part(each)]
        self._num_fed = 0  # characters, to it
        self._run = (0, 0)  # where the last content without a gap begins and ends
        self._first_end = 0  # where the text of the first min_tokens tokens ends
        self._hold_back = max(map(len, self._stop), default=1) - 1 if not params.include_stop_str_in_output else 0

    @property
    def has_stop(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop)

    def update(self, new_token_ids: list[int], stopped_by_token: bool, is_last: bool = False) -> str | None:
        """Take new ids; returns the stop string that ended the text, if one did. `stopped_by_token`: the last id is a
        stop id, whose text is excluded unless include_stop_str_in_output. `is_last`: no more ids come."""
        ids = new_token_ids
        if stopped_by_token and ids and not self._params.include_stop_str_in_output:
            ids = ids[:-1]
        self._pending_ids.extend(ids)
        self._num_tokens += len(new_token_ids)
        if not self._stop:
            # The text is not needed before take_text, which may come once, at the end.
            return None
        if self._content is not None:
            return self._search_content(self._content, ids, is_last)
        # A stop string that the first min_tokens tokens complete does not stop the text, whichever tokens come in one
        # update.
        early = max(self._params.min_tokens - (self._num_tokens - len(new_token_ids)), 0)
        later = self._pending_ids[early:] if early else []
        if early:
            del self._pending_ids[early:]
            self._decode_pending()
            self._pending_ids = later
        searched = len(self.text)
        self._decode_pending()
        if self._num_tokens <= self._params.min_tokens or stopped_by_token:
            return None
        return self._find_stop(searched)

    def take_text(self, finished: bool, delta: bool) -> str:
        """The text so far, or what was added since the last call (`delta`)."""
        self._decode_pending()
        known = len(self.text) if self._content is None else min(self._content.num_read, len(self.text))
        available = len(self.text) if finished else max(known - self._hold_back, self._num_sent)
        start = self._num_sent if delta else 0
        self._num_sent = available
        return self.text[start:available]

    def _decode_pending(self) -> None:
        if self._pending_ids:
            self.text += self._stream.step(self._pending_ids)
            self._pending_ids = []

    def _search_content(self, content: ContentReader, ids: Sequence[int], is_last: bool) -> str | None:
        """Cut the text at the first stop string within its content, where the last ids have shown that."""
        self._decode_pending()
        if self._num_tokens <= self._params.min_tokens:
            self._first_end = len(self.text)
        start, self._num_fed = self._num_fed, len(self.text)
        places = content.feed(self.text[start:], ids)
        if is_last:
            places += content.finish()
        for begin, end in places:
            self._run = (self._run[0] if begin == self._run[1] else begin), end
            found = self._find_within(self._run[0], begin, end, self._stop)
            if found is not None:
                return found
        return self._find_within(0, start, len(self.text), self._markup)

    def _find_within(self, begin: int, start: int, end: int, stop: list[str]) -> str | None:
        """Cut the text at the stop string that ends first from `start` to `end`, and begins at `begin` or later."""
        start = max(start, self._first_end)
        if not stop or start >= end:
            return None
        first = max(begin, start - max(map(len, stop)) + 1)
        include = self._params.include_stop_str_in_output
        found = check_stop_strings(self.text[first:end], end - start, stop, include)
        if found is None:
            return None
        text, length = found
        self.text = self.text[: end if length < 0 else first + length]
        return text

    def _find_stop(self, searched: int) -> str | None:
        """Cut the text at the stop string that ends first; it may begin before `searched`."""
        include = self._params.include_stop_str_in_output
        found = check_stop_strings(self.text, len(self.text) - searched, self._stop, include)
        if found is None:
            return None
        stop, length = found
        if length >= 0:
            self.text = self.text[:length]
        return stop


class ContentReader(Protocol):
    """Says where the content of a growing answer stands in its text, for answers that have other parts, too.

    Attributes:
        num_read: how many characters of the text belong to a part for sure.
    """

    num_read: int

    def ends_a_part(self, stop: str) -> bool:
        """Whether a stop string is markup that ends a part, so that it counts wherever it stands."""
        ...

    def feed(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Take the next piece of the text, which `token_ids` spell; returns where what is known to be content now
        begins and ends, ascending."""
        ...

    def finish(self) -> list[tuple[int, int]]:
        """Take the end of the text; returns as `feed`."""
        ...


def check_stop_strings(
    output_text: str, new_char_count: int, stop: list[str], include_in_output: bool
) -> tuple[str, int] | None:
    """The stop string that ends first within the last `new_char_count` characters; of those that end together, the one
    listed first.

    Returns:
        it and the length to cut the text to, -1 where there is nothing to cut; None if none is found.
    """
    best: tuple[int, str] | None = None
    for each in stop if new_char_count else ():
        where = output_text.find(each, max(len(output_text) - new_char_count - len(each) + 1, 0))
        if where >= 0 and (best is None or where + len(each) < best[0]):
            best = where + len(each), each
    if best is None:
        return None
    end, found = best
    if not include_in_output:
        return found, end - len(found)
    return found, -1 if end == len(output_text) else end
