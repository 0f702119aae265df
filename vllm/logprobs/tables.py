"""Readings of a prompt as named arrays, in the columns that the request asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm.logprobs.divergence import KLTerms, kl_terms, student_table


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
        cls,
        blocks: Sequence[np.ndarray],
        num_topk: int,
        requested: np.ndarray,
        first_position: int,
        has_entropy: bool,
        has_ranks: bool,
    ) -> PromptTables:
        """
        Args:
            blocks: rows as `LogprobsLists.block` gives them: the prompt's own token, T top-k entries, then the first
                columns of the requested ids.
            num_topk: T.
            requested: int32 [R, C], with -1 where there is no id.
            first_position: of the first row's token.
        """
        num_rows = len(requested)
        floats, ints = np.dtype(np.float32), np.dtype(np.int32)
        whole = [
            requested_cells(blocks, part, requested, num_topk, num_topk, dtype, filler)
            for part, (dtype, filler) in enumerate(((ints, -1), (floats, -np.inf), (floats, -np.inf), (ints, 0)))
        ]
        own = [
            _joined([block[:, part * (block.shape[1] // 4)] for block in blocks]).view(table.dtype)
            for part, table in enumerate(whole)
        ]
        ends = [_joined([block[:, end] for block in blocks]).view(np.float32) for end in (-2, -1)]
        token_ids, logprobs, logits, ranks = whole
        own_ids, own_logprobs, own_logits, own_ranks = own
        counts = num_topk + (requested >= 0).sum(axis=1, dtype=np.int32)
        positions = np.arange(first_position, first_position + num_rows, dtype=np.int32)
        return cls(
            positions=positions,
            token_ids=token_ids,
            logprobs=logprobs,
            logits=logits,
            ranks=ranks if has_ranks else None,
            counts=counts.astype(np.int32),
            own_token_ids=own_ids,
            own_logprobs=own_logprobs,
            own_logits=own_logits,
            own_ranks=own_ranks if has_ranks else None,
            lse=ends[0],
            entropy=ends[1] if has_entropy else None,
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


def requested_cells(
    blocks: Sequence[np.ndarray],
    part: int,
    requested: np.ndarray,
    num_topk: int,
    own_topk: int,
    dtype: np.dtype,
    filler: float,
) -> np.ndarray:
    """[R, T + C]: of each row its T = `num_topk` top-k cells and those of the requested ids, int32 [R, C], and
    `filler` where there is no id. `part`: 0 token ids, 1 logprobs, 2 logits, 3 ranks; `own_topk`: the top-k cells that
    blocks have."""
    num_rows, num_ids = requested.shape
    table = np.full((num_rows, num_topk + num_ids), filler, dtype)
    first = 0
    for block in blocks:
        width = block.shape[1] // 4
        cells = block[:, part * width : (part + 1) * width].view(dtype)
        rows = slice(first, first + len(block))
        table[rows, :num_topk] = cells[:, 1 : 1 + num_topk]
        table[rows, num_topk : num_topk + width - 1 - own_topk] = cells[:, 1 + own_topk :]
        first += len(block)
    table[:, num_topk:][requested < 0] = filler
    return table


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
