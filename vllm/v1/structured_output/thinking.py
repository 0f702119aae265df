"""What an answer may hold before its form: the model's reasoning."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vllm.params.structured import Thinking

_HEADER = "%thinking "


def with_thinking(thinking: Thinking | None, grammar: str) -> str:
    """A grammar's text with what may come before it; "": no form comes after it."""
    return grammar if thinking is None else f"{_HEADER}{json.dumps(asdict(thinking))}\n{grammar}"


def split_thinking(text: str) -> tuple[Thinking | None, str]:
    """What `with_thinking` has joined."""
    if not text.startswith(_HEADER):
        return None, text
    header, _, grammar = text.partition("\n")
    return Thinking(**json.loads(header.removeprefix(_HEADER))), grammar


def num_thinking_tokens(thinking: Thinking | None, pieces: Sequence[bytes]) -> int | None:
    """How many of an answer's tokens, given by their bytes, come before its form; None: it has not begun."""
    if thinking is None:
        return 0
    text, begin = b"".join(pieces), thinking.begin.encode()
    if not text.startswith(begin):
        return 0
    ends = [end.encode() for end in (thinking.end, *thinking.also_ends)]
    found = [place + len(end) for end in ends if (place := text.find(end, len(begin))) >= 0]
    sizes = itertools.accumulate(map(len, pieces))
    return next(count for count, size in enumerate(sizes, 1) if size >= min(found)) if found else None


class ThinkingMatcher:
    """Follows an answer that begins with reasoning, which may hold anything but the answer's end, and then its form."""

    def __init__(self, thinking: Thinking, form: Any, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]):
        """`form`: the form's Matcher; None: what follows is free, and so is the end. `tokenizer`: llguidance's."""
        self.num_taken = 0
        self._thinking, self._form, self._tokenizer = thinking, form, tokenizer
        self._begin: list[int] = tokenizer.tokenize_str(thinking.begin)
        self._end: list[int] = tokenizer.tokenize_str(thinking.end)
        self._ends = [each.encode() for each in (thinking.end, *thinking.also_ends)]
        self._forbidden: list[int] = []
        if form is not None:
            excluded = [tokenizer.tokenize_str(each) for each in thinking.excludes]
            self._forbidden = [*eos_token_ids, *(ids[0] for ids in excluded if len(ids) == 1)]
        self._vocab_size = vocab_size
        self._state = "before" if self._begin else "inside"
        self._num_begun = self._num_ended = 0  # tokens of the markers that came last
        self._count = 0
        self._tail = b""

    def take(self, token_ids: Sequence[int]) -> str | None:
        """See Matcher.take."""
        for place, token_id in enumerate(token_ids):
            if self._state == "before" and token_id == self._begin[self._num_begun]:
                self._num_begun += 1
                if self._num_begun == len(self._begin):
                    self._state = "inside"
            elif self._state == "inside":
                self._think(token_id)
            else:
                self._state = "after"
                rest = token_ids[place:]
                self.num_taken += len(rest)
                return None if self._form is None else self._form.take(rest)
            self.num_taken += 1
        return None

    def _think(self, token_id: int) -> None:
        self._count += 1
        end = self._end
        self._num_ended = self._num_ended + 1 if token_id == end[self._num_ended] else int(token_id == end[0])
        # Other tokens may spell the same text.
        self._tail = (self._tail + self._tokenizer.decode_bytes([token_id]))[-(max(map(len, self._ends)) + 64) :]
        if self._num_ended == len(end) or any(text in self._tail for text in self._ends):
            self._state = "after"

    def forced(self) -> list[int]:
        """See Matcher.forced."""
        return self._form.forced() if self._state == "after" and self._form is not None else []

    def fill_mask(self, mask: np.ndarray) -> str | None:
        """See Matcher.fill_mask."""
        if self._state == "before" and self._num_begun:
            # What has begun like it and goes on otherwise is free text, if no form follows.
            self._set_all(mask) if self._form is None else _set_only(mask, self._begin[self._num_begun])
        elif self._state == "inside":
            budget = self._thinking.budget
            if budget is not None and self._count - self._num_ended >= budget:
                _set_only(mask, self._end[self._num_ended])
            else:
                self._set_all(mask)
                for token_id in self._forbidden:
                    _clear(mask, token_id)
        else:
            error = self._fill_form(mask)
            if error is not None:
                return error
            if self._state == "before":
                _set(mask, self._begin[0])
        return None

    def _fill_form(self, mask: np.ndarray) -> str | None:
        if self._form is not None:
            return self._form.fill_mask(mask)
        self._set_all(mask)
        return None

    def _set_all(self, mask: np.ndarray) -> None:
        mask.view(np.uint32)[:] = 0xFFFFFFFF
        if rest := self._vocab_size % 32:
            mask.view(np.uint32)[-1] = (1 << rest) - 1


def _set(mask: np.ndarray, token_id: int) -> None:
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear(mask: np.ndarray, token_id: int) -> None:
    mask.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


def _set_only(mask: np.ndarray, token_id: int) -> None:
    mask[:] = 0
    _set(mask, token_id)
