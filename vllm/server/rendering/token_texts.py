"""Tokens as answers show them: texts, bytes, offsets in the whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

from vllm.tokenizers.tokenizer import Tokenizer

HeadWriter = Callable[[int, str, list[int] | None], bytes]
_HeadsByKind = dict[tuple[HeadWriter, bool], dict[int, bytes]]
_heads: WeakKeyDictionary[Tokenizer, _HeadsByKind] = WeakKeyDictionary()


class TokenNames:
    """How single tokens are shown: by their texts, or as "token_id:N" with `as_ids` or without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._heads: _HeadsByKind = {} if tokenizer is None else _heads.setdefault(tokenizer, {})
        self.as_ids = as_ids or tokenizer is None

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's text, with the replacement character for parts of characters."""
        if self.as_ids or self._tokenizer is None:
            return [id_name(token_id) for token_id in token_ids]
        return self._tokenizer.decode_tokens(token_ids)

    def bytes_of(self, token_id: int) -> list[int] | None:
        """The bytes that the token adds to a text; None without a tokenizer."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def heads(self, token_ids: Sequence[int], write: HeadWriter) -> list[bytes]:
        """`write(id, text, bytes)` of each token, cached per module-level function `write` for the tokenizer's life."""
        known = self._heads.setdefault((write, self.as_ids), {})
        for token_id in set(token_ids).difference(known):
            (text,) = self.texts([token_id])
            known[token_id] = write(token_id, text, self.bytes_of(token_id))
        return [known[token_id] for token_id in token_ids]


def id_name(token_id: int) -> str:
    """The name of a token that is not shown by its text."""
    return f"token_id:{token_id}"


class TokenPieces:
    """The tokens of a growing text and their offsets.

    Concatenated, the pieces are the text: a token that completes no character is an empty piece, and the one that
    completes it has it whole. Special tokens that the text leaves out are shown but have no width.

    Attributes:
        broken: with `shows_broken`, U+FFFD for a character that the prompt begins and the tokens do not finish, once
            that is known; the piece of the token that shows it begins with it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        offset: int,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        shows_broken: bool = False,
    ) -> None:
        """The tokens continue `prompt_ids`. `offset`: of the first token, in characters."""
        self.broken = ""
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset[int]()
        self._stream = tokenizer.decode_stream(False, spaces_between_special_tokens, prompt_ids)
        self._shows_broken = shows_broken
        self._offset = offset

    def add(self, token_ids: Iterable[int]) -> tuple[list[str], list[int]]:
        """(pieces, offsets) of the next tokens."""
        pieces, offsets = [], []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id in self._skipped:
                (piece,) = self._tokenizer.decode_tokens([token_id])
            else:
                piece = self._stream.step([token_id])
                if self._shows_broken and self.broken != self._stream.broken:
                    self.broken = self._stream.broken
                    piece = self.broken + piece
                self._offset += len(piece)
            pieces.append(piece)
        return pieces, offsets


def split_text(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> tuple[str, list[str], list[int]]:
    """(text, pieces, offsets) of a whole text, as in TokenPieces; without `text` it is made from the tokens. Those that
    are not in the text, such as one that begins every text, have no width; a space only in a token is left out."""
    stream = tokenizer.decode_stream(skip_special_tokens=False)
    pieces = [stream.step([token_id]) for token_id in token_ids]
    if text is None:
        text = "".join(pieces)
    special = frozenset(tokenizer.all_special_ids)
    offsets, end = [], 0
    for index, (piece, token_id) in enumerate(zip(pieces, token_ids, strict=True)):
        offsets.append(end)
        if text.startswith(piece, end):
            end += len(piece)
        elif token_id not in special:
            bare = piece.lstrip(" ")
            if text.startswith(bare, end):
                pieces[index] = bare
            end = min(end + len(pieces[index]), len(text))
    return text, pieces, offsets
