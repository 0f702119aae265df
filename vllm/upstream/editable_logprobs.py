"""Readings that a caller puts together: lists of dicts, or flat lists of all entries. `FlatLogprobs()` gives a caller
EditableLogprobs, to be filled; the engine makes none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, overload

from vllm.logprobs.flat import FlatLogprobs
from vllm.logprobs.position import Logprob

_OnePosition = dict[int, Logprob]


class EditableLogprobs(MutableSequence[Any]):
    """One `{token_id: Logprob}` a position, over lists; grows at its end. An instance of FlatLogprobs to `isinstance`.

    Attributes:
        start_indices, end_indices: position i is the slice `start_indices[i]:end_indices[i]` of the others.
        token_ids, logprobs, ranks, decoded_tokens: of all entries, one position after another.
    """

    def __init__(
        self,
        start_indices: list[int] | None = None,
        end_indices: list[int] | None = None,
        token_ids: list[int] | None = None,
        logprobs: list[float] | None = None,
        ranks: list[int | None] | None = None,
        decoded_tokens: list[str | None] | None = None,
    ) -> None:
        """The lists become its own; those left out are empty."""
        self.start_indices = [] if start_indices is None else start_indices
        self.end_indices = [] if end_indices is None else end_indices
        self.token_ids = [] if token_ids is None else token_ids
        self.logprobs = [] if logprobs is None else logprobs
        self.ranks = [] if ranks is None else ranks
        self.decoded_tokens = [] if decoded_tokens is None else decoded_tokens

    def append(self, logprobs_one_position: _OnePosition | None) -> None:
        """Add a position; None has no entries."""
        entries = logprobs_one_position or {}
        self.append_fast(
            list(entries),
            [each.logprob for each in entries.values()],
            [each.rank for each in entries.values()],
            [each.decoded_token for each in entries.values()],
        )

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position by its columns. `ranks` and `decoded_tokens` may go on without end."""
        count = len(token_ids)
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += itertools.islice(ranks, count)
        self.decoded_tokens += itertools.islice(decoded_tokens, count)
        self.end_indices.append(len(self.token_ids))

    def extend(self, logprobs_multi_positions: Iterable[_OnePosition | None]) -> None:
        """Add positions, of another of these as well."""
        for position in list(logprobs_multi_positions):
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> _OnePosition: ...
    @overload
    def __getitem__(self, index: slice) -> EditableLogprobs: ...
    def __getitem__(self, index: int | slice) -> _OnePosition | EditableLogprobs:
        if isinstance(index, slice):
            part = EditableLogprobs()
            part.extend(self[place] for place in range(*index.indices(len(self))))
            return part
        span = slice(self.start_indices[index], self.end_indices[index])
        columns = self.token_ids[span], self.logprobs[span], self.ranks[span], self.decoded_tokens[span]
        return {token: Logprob(value, rank, text) for token, value, rank, text in zip(*columns, strict=True)}

    def __iter__(self) -> Iterator[_OnePosition]:
        return map(self.__getitem__, range(len(self)))

    def __setitem__(self, item: Any, value: Any) -> None:
        raise TypeError("flat readings grow at their end; make a list of them to change it")

    def __delitem__(self, item: Any) -> None:
        raise TypeError("flat readings grow at their end; make a list of them to change it")

    def insert(self, index: int, value: _OnePosition | None) -> None:
        """Raises TypeError."""
        raise TypeError("flat readings grow at their end; make a list of them to change it")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


FlatLogprobs.register(EditableLogprobs)


def create_prompt_logprobs(flat_logprobs: bool) -> EditableLogprobs | list[_OnePosition | None]:
    """Readings of a prompt's first token: there are none."""
    found = create_sample_logprobs(flat_logprobs)
    found.append(None)
    return found


def create_sample_logprobs(flat_logprobs: bool) -> EditableLogprobs | list[_OnePosition | None]:
    """Readings of no position yet."""
    return EditableLogprobs() if flat_logprobs else []


def append_logprobs_for_next_position(
    request_logprobs: EditableLogprobs | list[_OnePosition | None],
    token_ids: list[int],
    logprobs: list[float],
    decoded_tokens: Iterable[str | None],
    rank: int,
    num_logprobs: int,
) -> None:
    """Add a position: the sampled token, then the most likely ones.

    Args:
        rank: of the sampled token; the others have ranks from 1.
        num_logprobs: how many of the others have a place, -1 = all.

    Raises:
        TypeError: `request_logprobs` is a result of the engine, which does not change.
    """
    # By its type: a result of the engine passes for a list elsewhere.
    if not issubclass(type(request_logprobs), (EditableLogprobs, list)):
        raise TypeError(f"{type(request_logprobs).__name__} is a result: make readings by create_sample_logprobs")
    count = len(token_ids) if num_logprobs == -1 else min(1 + num_logprobs, len(token_ids))
    ranks: Sequence[int] = [rank, *range(1, count)]
    texts = list(itertools.islice(decoded_tokens, count))
    if isinstance(request_logprobs, EditableLogprobs):
        request_logprobs.append_fast(token_ids[:count], logprobs[:count], ranks, texts)
    else:
        columns = zip(token_ids[:count], logprobs[:count], ranks, texts, strict=True)
        request_logprobs.append({token: Logprob(value, rank, text) for token, value, rank, text in columns})
