"""Readings of a prompt as named arrays, in the columns that the request asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from vllm.logprobs.divergence import KLTerms, kl_terms, student_table


class StoredRows(NamedTuple):
    """Rows as the engine reads them: the prompt's own token, T top-k entries, then up to M distinct requested ids. What
    follows a row's own cells is of no meaning."""

    token_ids: np.ndarray  # int32 [R, 1 + T + M]
    logprobs: np.ndarray  # float32 [R, 1 + T + M]
    logits: np.ndarray  # float32 [R, 1 + T + M]
    ranks: np.ndarray | None  # int32 [R, 1 + T + M]; None: left out
    lse: np.ndarray  # float32 [R]
    entropy: np.ndarray  # float32 [R]


@dataclass(frozen=True)
class PromptTables:
    """Readings of R prompt tokens, of K = T + C columns: the T most likely tokens, then the C columns of
    `prompt_logprob_token_ids` as the request has them, an id that stands twice included.

    Where a row has no id (its list is shorter, or has -1): -1 in `token_ids`, -inf in `logprobs` and `logits`, 0 in
    `ranks`. Logprobs are logprobs and logits logits in every `logprobs_mode`.

    Attributes:
        positions: int32 [R], of the prompt's tokens that the rows are about; each is read from the logits before it.
        token_ids: int32 [R, K].
        logprobs, logits: float32 [R, K].
        ranks: int32 [R, K], 1 + the number of vocabulary entries with a greater logit; None with `logprob_ranks=False`.
        counts: int32 [R], how many of the row's columns have an id.
        own_token_ids, own_logprobs, own_logits, own_ranks: [R], of the prompt's own tokens; no ranks without `ranks`.
        lse: float32 [R], log-sum-exp of the logits.
        entropy: float32 [R], nats; None unless `logprob_entropy` requested it.
        num_topk: T.
    """

    positions: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    logits: np.ndarray
    ranks: np.ndarray | None
    counts: np.ndarray
    own_token_ids: np.ndarray
    own_logprobs: np.ndarray
    own_logits: np.ndarray
    own_ranks: np.ndarray | None
    lse: np.ndarray
    entropy: np.ndarray | None
    num_topk: int

    @classmethod
    def of(
        cls, rows: StoredRows, num_topk: int, requested: np.ndarray | None, first_position: int, has_entropy: bool
    ) -> PromptTables:
        """
        Args:
            num_topk: T.
            requested: int32 [R or 1, C], with -1 where there is no id; None: C = 0.
            first_position: of the first row's token.
        """
        num_rows = len(rows.lse)
        ids = np.empty((1, 0), np.int32) if requested is None else requested
        columns = _columns(ids, num_topk + 1)
        is_padding = np.broadcast_to(ids < 0, (num_rows, ids.shape[1])) if (ids < 0).any() else None
        counts = np.full(num_rows, num_topk + ids.shape[1], np.int32)
        if is_padding is not None:
            counts -= is_padding.sum(axis=1, dtype=np.int32)

        def table(stored: np.ndarray, filler: float) -> np.ndarray:
            cells = _cells(stored, columns, num_topk, ids.shape[1])
            if is_padding is not None:
                cells[:, num_topk:][is_padding] = filler
            return cells

        own_ids, own_logprobs, own_logits = (np.ascontiguousarray(each[:, 0]) for each in rows[:3])
        positions = np.arange(first_position, first_position + num_rows, dtype=np.int32)
        entropy = rows.entropy if has_entropy else None
        return cls(
            positions=positions,
            token_ids=table(rows.token_ids, -1),
            logprobs=table(rows.logprobs, -np.inf),
            logits=table(rows.logits, -np.inf),
            ranks=None if rows.ranks is None else table(rows.ranks, 0),
            counts=counts,
            own_token_ids=own_ids,
            own_logprobs=own_logprobs,
            own_logits=own_logits,
            own_ranks=None if rows.ranks is None else np.ascontiguousarray(rows.ranks[:, 0]),
            lse=rows.lse,
            entropy=entropy,
            num_topk=num_topk,
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that there are, by name."""
        found = ((name, getattr(self, name)) for name in TABLE_NAMES)
        return {name: array for name, array in found if array is not None}

    def kl(self, student_logprobs: Sequence[Sequence[float | None]] | np.ndarray) -> KLTerms:
        """The Kullback-Leibler divergences between a student and this model at each position, over the requested ids
        and one bucket for all others; see `kl_terms`.

        Args:
            student_logprobs: the student's logprobs of the ids of `prompt_logprob_token_ids`, in the same columns: an
                array [R, C], whose cells without an id are ignored, or lists of the rows' own lengths.

        Raises:
            VLLMValidationError: they are no logprobs, their shape is another one, or a row has an id twice.
        """
        student = student_table(student_logprobs, self._requested_ids)
        return kl_terms(student, self.logprobs[:, self.num_topk :])

    @cached_property
    def _requested_ids(self) -> np.ndarray:
        return self.token_ids[:, self.num_topk :]


TABLE_NAMES = (
    "positions", "token_ids", "logprobs", "logits", "ranks", "counts",
    "own_token_ids", "own_logprobs", "own_logits", "own_ranks", "lse", "entropy",
)  # fmt: skip
"""The arrays of PromptTables."""


def _columns(ids: np.ndarray, first: int) -> np.ndarray | None:
    """int64 [R, C]: the stored column of each requested id, of which those of a row are stored once each, in order,
    from `first` on; -1 is at any column. None: each has its own."""
    if ids.shape[1] < 2 or not ids.size:
        return None
    order = np.argsort(ids, axis=1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=1)
    is_first = np.ones(ids.shape, dtype=bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    is_stored = np.empty_like(is_first)
    np.put_along_axis(is_stored, order, is_first & (ordered >= 0), axis=1)
    # Padding behind a row's ids moves none of them.
    if (is_stored == (ids >= 0)).all() and (is_stored[:, 1:] <= is_stored[:, :-1]).all():
        return None
    places = np.cumsum(is_stored, axis=1) - 1
    # The first of equal ids, by its index among the ordered ones.
    firsts = np.maximum.accumulate(np.where(is_first, np.arange(ids.shape[1]), 0), axis=1)
    found = np.take_along_axis(places, np.take_along_axis(order, firsts, axis=1), axis=1)
    columns = np.empty_like(found)
    np.put_along_axis(columns, order, np.maximum(found, 0), axis=1)
    return columns + first


def _cells(stored: np.ndarray, columns: np.ndarray | None, num_topk: int, num_requested: int) -> np.ndarray:
    """[R, T + C]: the top-k cells and those of the requested columns; those without an id hold anything."""
    num_rows, width = stored.shape
    table = np.empty((num_rows, num_topk + num_requested), stored.dtype)
    table[:, :num_topk] = stored[:, 1 : 1 + num_topk]
    if columns is not None:
        whole = np.broadcast_to(np.minimum(columns, width - 1), (num_rows, num_requested))
        table[:, num_topk:] = np.take_along_axis(stored, whole, axis=1)
    else:
        there = min(num_requested, width - 1 - num_topk)
        table[:, num_topk : num_topk + there] = stored[:, 1 + num_topk : 1 + num_topk + there]
    return table
