"""Callers may ask this of a tokenizer: what transformers' tokenizers give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class TokenizerLike(Protocol):
    """A tokenizer of transformers, or one like it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids."""

    def get_vocab(self) -> dict[str, int]:
        """The id of each token."""

    def apply_chat_template(self, messages: list[Any], tools: list[dict[str, Any]] | None = None, **kwargs: Any) -> Any:
        """A conversation as a text or as ids."""

    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
        """The vocabulary's spelling of each id."""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of spellings."""
