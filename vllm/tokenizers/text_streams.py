"""Text of sequences that grow, never cut inside a character, from wherever their prompts end."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_TAIL = 16  # of a prompt's tokens; a character has four bytes, so the last three decide, and few tokens add none
_Speller = Callable[[int], bytes]
_Decoder = Callable[[list[int]], str]


class TokenStream(Protocol):
    """Text of a growing sequence, never cut inside a character.

    Attributes:
        broken: U+FFFD for the character that the prompt begins and the sequence does not finish, as soon as another one
            follows; else empty. It is not part of the sequence's text.
    """

    broken: str

    def step(self, ids: Iterable[int]) -> str:
        """The text that `ids` add; an incomplete character is held back until it is complete."""


class ByteStream:
    """For vocabularies whose tokens are bytes."""

    def __init__(self, token_bytes: _Speller, skipped: frozenset[int], prompt_ids: Sequence[int]) -> None:
        """`skipped` ids have no text. A character that `prompt_ids` leave unfinished begins the text."""
        self.broken = ""
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun = _unfinished_bytes(token_bytes, prompt_ids)
        self._decoder.decode(self._begun)

    def step(self, ids: Iterable[int]) -> str:
        added = b"".join(self._token_bytes(i) for i in ids if i not in self._skipped)
        text = self._decoder.decode(added)
        if not self._begun:
            return text
        self._begun += added
        if not text:
            return ""
        if text[0] == REPLACEMENT and not self._begun.startswith(REPLACEMENT.encode()):
            self.broken, text = text[0], text[1:]
        self._begun = b""
        return text


class RedecodingStream:
    """For any vocabulary: decodes the last tokens again with the new ones; the difference is the new text."""

    def __init__(
        self, decode: _Decoder, skipped: frozenset[int], unspaced: frozenset[int], prompt_ids: Sequence[int]
    ) -> None:
        """As ByteStream; `decode` gives special tokens their texts, and between `unspaced` ids there is no space."""
        self.broken = ""
        self._decode = decode
        self._skipped = skipped
        self._unspaced = unspaced
        self._last: int | None = None
        self._context: list[int] = []  # ids already returned as text, kept as a space may depend on the token before
        self._waiting = unfinished_ids(self._decode, prompt_ids)
        self._begun = self._decode(self._waiting)
        self._shown = self._begun.rstrip(REPLACEMENT)  # of the text of context and waiting

    def step(self, ids: Iterable[int]) -> str:
        text = ""
        for token_id in ids:
            if token_id in self._skipped:
                continue
            if self._last in self._unspaced and token_id in self._unspaced:
                text += self._advance()
                self._context, self._shown = [], ""
            self._waiting.append(token_id)
            self._last = token_id
        return text + self._advance()

    def _advance(self) -> str:
        text = self._decode(self._context + self._waiting)
        whole = text.rstrip(REPLACEMENT)
        if len(whole) <= len(self._shown):
            return ""
        added = whole[len(self._shown) :]
        if self._begun:
            self.broken, added = continue_text(self._begun, whole)
            self._begun = ""
        self._shown = whole
        if whole == text:
            self._context, self._waiting = self._waiting, []
            self._shown = self._decode(self._context)
        return added


def unfinished_ids(decode: _Decoder, prompt_ids: Sequence[int]) -> list[int]:
    """The ids at a prompt's end since its last whole character, if a character is unfinished there; else empty."""
    tail = list(prompt_ids[-_TAIL:])
    for end in range(len(tail), 0, -1):
        # One of these begins where a character does, whatever stands before it.
        texts = (decode(tail[start:end]) for start in range(end - 1, max(end - 5, -1), -1))
        if any(text and not text.endswith(REPLACEMENT) for text in texts):
            tail = tail[end:]
            break
    return tail if tail and decode(tail).endswith(REPLACEMENT) else []


def continue_text(begun: str, text: str) -> tuple[str, str]:
    """(broken, added): `text` goes on from `begun`, which ends in an unfinished character; see TokenStream."""
    same = next((place for place, pair in enumerate(zip(begun, text, strict=False)) if pair[0] != pair[1]), len(begun))
    whole = len(begun.rstrip(REPLACEMENT))
    return text[whole:same], text[same:]


def _unfinished_bytes(token_bytes: _Speller, prompt_ids: Sequence[int]) -> bytes:
    tail = b""
    for token_id in reversed(prompt_ids[-_TAIL:]):
        tail = token_bytes(token_id)[-3:] + tail
        if len(tail) >= 3:
            break
    tail = tail[-3:]
    # A character begins where no continuation byte (10xxxxxx) is; before it there is nothing unfinished.
    start = next((index for index in reversed(range(len(tail))) if tail[index] & 0xC0 != 0x80), len(tail))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(tail[start:])
    return decoder.getstate()[0]
