"""Prompts cut to a number of tokens. Of a text, what the tokenizer puts around it counts and stays, as in transformers;
which ids of a list were put there nobody knows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Literal

from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import Tokenizer

TruncationSide = Literal["left", "right"]
"""The side that goes."""


def truncate_text(
    tokenizer: Tokenizer,
    text: str,
    ids: list[int],
    limit: int,
    side: TruncationSide,
    add_special_tokens: bool = True,
) -> list[int]:
    """At most `limit` tokens of a text: transformers' with truncation=True, max_length=limit, truncation_side=side.

    Args:
        ids: of the whole text; `add_special_tokens` says whether they have the tokenizer's special tokens. Those that
            the text itself spells are text.

    Raises:
        VLLMValidationError: fewer tokens than the special ones, where transformers cuts nothing.
    """
    if len(ids) <= limit:
        return ids
    before, inner, after = _parts(tokenizer, text, ids) if add_special_tokens else ([], ids, [])
    room = limit - len(before) - len(after)
    if room < 0:
        message = (
            f"truncate_prompt_tokens: {limit} tokens have no room for the {len(before) + len(after)} special tokens "
            "that the tokenizer puts around a text"
        )
        raise VLLMValidationError(message, "truncate_prompt_tokens", limit)
    return [*before, *_cut(inner, room, side), *after]


def truncate_ids(ids: list[int], limit: int, side: TruncationSide, special_ids: Container[int] = ()) -> list[int]:
    """At most `limit` tokens of a list of ids. The outermost one on the cut side stays if it is of `special_ids`."""
    if len(ids) <= limit:
        return ids
    has_end = limit > 1 and ids[0 if side == "left" else -1] in special_ids
    if side == "left":
        return [*ids[:has_end], *_cut(ids, limit - has_end, side)]
    return [*_cut(ids, limit - has_end, side), *ids[len(ids) - has_end :]]


def special_tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text."""
    for probe in chain(["a"], _token_texts(tokenizer)):
        before, inner, after = _parts(tokenizer, probe, tokenizer.encode(probe))
        if inner:
            return before, after
    return [], []


def _parts(tokenizer: Tokenizer, text: str, ids: list[int]) -> tuple[list[int], list[int], list[int]]:
    """The text's ids as those before it, its own, and those after it."""
    inner = tokenizer.encode(text, add_special_tokens=False)
    for start in range(len(ids) - len(inner) + 1):
        if ids[start : start + len(inner)] == inner:
            return ids[:start], inner, ids[start + len(inner) :]
    return [], ids, []


def _token_texts(tokenizer: Tokenizer) -> Iterable[str]:
    """For vocabularies without the letter a."""
    return (tokenizer.decode([token_id]) for token_id in range(tokenizer.vocab_size))


def _cut(ids: Sequence[int], limit: int, side: TruncationSide) -> Sequence[int]:
    return ids[len(ids) - limit :] if side == "left" else ids[:limit]
