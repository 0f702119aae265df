"""The part of an answer before its form: the model's reasoning."""

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
    """Split what `with_thinking` has joined."""
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


class Completions:
    """Which tokens complete a text that has begun, for texts that reasoning must not hold."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`tokenizer`: llguidance's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._pieces: list[bytes] = []
        self._found: dict[bytes, list[np.ndarray]] = {}

    def of(self, text: bytes) -> list[np.ndarray]:
        """By the number of its bytes that have come, the ids of tokens after which all of it has, int64 [N]."""
        if text not in self._found:
            if not self._pieces:
                self._pieces = [self._tokenizer.decode_bytes([each]) for each in range(self._vocab_size)]
            wholes = [index for index, piece in enumerate(self._pieces) if text in piece]
            rests = [text[begun:] for begun in range(1, len(text))]
            by_rest = [[index for index, piece in enumerate(self._pieces) if piece.startswith(rest)] for rest in rests]
            self._found[text] = [np.asarray(ids, np.int64) for ids in (wholes, *by_rest)]
        return self._found[text]


class ThinkingMatcher:
    """Follows an answer that begins with reasoning, which may hold anything but the answer's end, and then its form."""

    def __init__(
        self, thinking: Thinking, form: Any, tokenizer: Any, completions: Completions, eos_token_ids: Sequence[int]
    ) -> None:
        """`form`: the form's Matcher; None: what follows is free, and so is the end. `tokenizer`: llguidance's."""
        self.num_taken = 0
        self._thinking, self._form, self._tokenizer = thinking, form, tokenizer
        self._begin: list[int] = tokenizer.tokenize_str(thinking.begin)
        self._end: list[int] = tokenizer.tokenize_str(thinking.end)
        self._ends = [each.encode() for each in (thinking.end, *thinking.also_ends)]
        excluded = [] if form is None else [each.encode() for each in thinking.excludes]
        self._excluded = [(each, completions.of(each)) for each in excluded]
        self._forbidden = [] if form is None else list(eos_token_ids)
        self._vocab_size: int = tokenizer.vocab_size
        self._state = "before" if self._begin else "inside"
        self._num_begun = self._num_ended = 0  # tokens of the markers that came last
        self._begun_form: Any = None  # which has taken what began like the reasoning, too
        self._count = 0
        self._tail = b""
        self._longest_tail = max(map(len, (*self._ends, *excluded))) + 64

    def take(self, token_ids: Sequence[int]) -> str | None:
        """See Matcher.take."""
        for place, token_id in enumerate(token_ids):
            if self._state == "before" and self._begins(token_id):
                pass
            elif self._state == "inside":
                self._think(token_id)
            else:
                self._state = "after"
                rest = token_ids[place:]
                self.num_taken += len(rest)
                return None if self._form is None else self._form.take(rest)
            self.num_taken += 1
        return None

    def _begins(self, token_id: int) -> bool:
        """Whether the beginning goes on by this token."""
        if self._form is None:
            # Other tokens may spell the same text, after white space too: nothing has ruled them out.
            self._tail = (self._tail + self._tokenizer.decode_bytes([token_id])).lstrip()
            begin = self._thinking.begin.encode()
            if self._tail.startswith(begin):
                self._state, self._tail = "inside", self._tail[len(begin) :]
                return True
            return begin.startswith(self._tail)
        if token_id != self._begin[self._num_begun]:
            if self._begun_form is not None:
                self._form = self._begun_form
            return False
        if not self._num_begun:
            self._begun_form = self._form.copy()
        if self._begun_form is not None and self._begun_form.take([token_id]) is not None:
            self._begun_form = None
        self._num_begun += 1
        if self._num_begun == len(self._begin):
            self._state, self._begun_form = "inside", None
        return True

    def _think(self, token_id: int) -> None:
        self._count += 1
        end = self._end
        self._num_ended = self._num_ended + 1 if token_id == end[self._num_ended] else int(token_id == end[0])
        # Other tokens may spell the same text.
        self._tail = (self._tail + self._tokenizer.decode_bytes([token_id]))[-self._longest_tail :]
        # An end that has begun is not cut short by another one within it.
        ends = self._ends[:1] if self._num_ended > 1 else self._ends
        if self._num_ended == len(end) or any(text in self._tail for text in ends):
            self._state = "after"

    def forced(self) -> list[int]:
        """See Matcher.forced."""
        if self._state == "after":
            return [] if self._form is None else self._form.forced()
        if self._state == "before":
            return self._begin[self._num_begun :] if self._num_begun and self._begun_form is None else []
        if not self._is_spent:
            return []
        return self._end[self._num_ended :] + ([] if self._form is None else self._form.forced())

    @property
    def _is_spent(self) -> bool:
        budget = self._thinking.budget
        return budget is not None and self._count - self._num_ended >= budget

    def fill_mask(self, mask: np.ndarray) -> str | None:
        """See Matcher.fill_mask."""
        if self._state == "before" and self._num_begun:
            if self._begun_form is None:
                _set_only(mask, self._begin[self._num_begun])
            else:
                error = self._begun_form.fill_mask(mask)
                _set(mask, self._begin[self._num_begun])
                return error
        elif self._state == "inside":
            if self._is_spent:
                _set_only(mask, self._end[self._num_ended])
            else:
                self._fill_thought(mask)
        else:
            error = self._fill_form(mask)
            if error is not None:
                return error
            if self._state == "before":
                _set(mask, self._begin[0])
        return None

    def _fill_thought(self, mask: np.ndarray) -> None:
        self._set_all(mask)
        for token_id in self._forbidden:
            _clear(mask, token_id)
        for text, completing in self._excluded:
            for num_begun, token_ids in enumerate(completing):
                if self._tail.endswith(text[:num_begun]):
                    for token_id in token_ids.tolist():
                        _clear(mask, token_id)

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
