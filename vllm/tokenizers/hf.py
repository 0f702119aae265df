"""transformers' tokenizers, as they are."""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


def get_cached_tokenizer(tokenizer: _T) -> _T:
    """The tokenizer itself: transformers' own remember what is asked often."""
    return tokenizer


def maybe_make_thread_pool(tokenizer: _T, copies: int = 1) -> _T:
    """The tokenizer itself: the engine encodes batches in the library's own threads."""
    return tokenizer
