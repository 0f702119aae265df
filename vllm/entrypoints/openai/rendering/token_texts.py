"""Tokens as answers show them: their texts, their bytes, their places in the whole text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

from vllm.tokenizers.tokenizer import Tokenizer

HeadWriter = Callable[[int, str, list[int] | None], bytes]
_HeadsByKind = dict[tuple[HeadWriter, bool], dict[int, bytes]]
_heads: WeakKeyDictionary[Tokenizer, _HeadsByKind] = WeakKeyDictionary()


class TokenNames:
    """Single tokens by themselves."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        """
        Args:
            tokenizer: the model's; None = tokens have no text, only ids.
            as_ids: show "token_id:N" for every text.
        """
        self._tokenizer = tokenizer
        self._own_heads: _HeadsByKind = {}
        self.as_ids = as_ids or tokenizer is None

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's text; a part of a character is the replacement character."""
        if self.as_ids or self._tokenizer is None:
            return [id_name(token_id) for token_id in token_ids]
        return self._tokenizer.decode_tokens(token_ids)

    def bytes_of(self, token_id: int) -> list[int] | None:
        """The bytes that the token adds to a text; None without a tokenizer."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def heads(self, token_ids: Sequence[int], write: HeadWriter) -> list[bytes]:
        """What `write` makes of each token, which is remembered as long as there is the tokenizer.

        Args:
            token_ids: the tokens.
            write: a function of a module, called with a token's id, text and bytes.
        """
        by_kind = self._own_heads if self._tokenizer is None else _heads.setdefault(self._tokenizer, {})
        known = by_kind.setdefault((write, self.as_ids), {})
        found = list(map(known.get, token_ids))
        if None in found:
            for index, token_id in enumerate(token_ids):
                if found[index] is None:
                    (text,) = self.texts([token_id])
                    found[index] = known[token_id] = write(token_id, text, self.bytes_of(token_id))
        return found  # type: ignore[return-value]


def id_name(token_id: int) -> str:
    """A token's name where its text would not do."""
    return f"token_id:{token_id}"


class TokenPieces:
    """The tokens of a text and where each begins, as it grows.

    Put together, the pieces are the text: a token that ends no character is an empty piece, and the one that ends the
    character has it whole. Special tokens that the text leaves out have a name but no width.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int, skip_special_tokens: bool) -> None:
        """
        Args:
            tokenizer: the model's.
            offset: where the first token begins, in characters.
            skip_special_tokens: whether the text leaves special tokens out.
        """
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset[int]()
        self._stream = tokenizer.decode_stream(skip_special_tokens=False)
        self._offset = offset

    def add(self, token_ids: Iterable[int]) -> tuple[list[str], list[int]]:
        """(pieces, offsets) of further tokens."""
        pieces, offsets = [], []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id in self._skipped:
                (piece,) = self._tokenizer.decode_tokens([token_id])
            else:
                piece = self._stream.step([token_id])
                self._offset += len(piece)
            pieces.append(piece)
        return pieces, offsets


def split_text(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> tuple[str, list[str], list[int]]:
    """A whole text by its tokens.

    Args:
        tokenizer: the model's.
        text: what the tokens were made from; None = they were given as ids, and the text is made from them.
        token_ids: its tokens.

    Returns:
        (text, pieces, offsets), as TokenPieces. Tokens that do not stand in the text, as the one that begins every
        text, have no width; a space that only the tokens have is left out.
    """
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
