"""How rows of logits are read and drawn from, where a row holds the whole vocabulary; vocab_parallel.py does the same
where a rank has a slice of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm.logprobs.lists import WIDEST_TABLE
from vllm.ops.token_readings import Readings, token_readings
from vllm.ops.top_p import keep_top_p_
from vllm.ops.topk import topk
from vllm.v1.worker.gpu.sample.gumbel import draw


class Drawn(NamedTuple):
    """One token of each of R rows."""

    token_ids: torch.Tensor  # int32 [R]
    logits: torch.Tensor  # float32 [R], theirs
    maxima: list[torch.Tensor]  # what came with them, float32 [R] each, over the whole vocabulary


class WholeVocab:
    """One rank: its logits are all there are.

    Everywhere, R rows of logits are in float32, bfloat16 or float16, and in float32 where they are changed. Token ids
    are those of the vocabulary, never columns.
    """

    def columns(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Where the tokens stand in a `workspace`."""
        return token_ids

    def workspace(self, logits: torch.Tensor) -> torch.Tensor:
        """The rows, float32, in a form in which every token id has a column."""
        return logits

    def most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The greatest logits' ids, int32 [R], the lowest among equals, and the rows' log-sum-exps, float32 [R]."""
        no_ids = torch.empty((len(logits), 0), dtype=torch.int32, device=logits.device)
        readings = token_readings(logits, no_ids)
        return readings.argmax, readings.lse

    def read(
        self,
        logits: torch.Tensor,
        columns: torch.Tensor,
        num_topk: int,
        num_valid: torch.Tensor | None,
        entropy: bool = False,
        first: torch.Tensor | None = None,
    ) -> Readings:
        """Read each row's tokens: one of its own, the most likely ones by descending logit, those that are asked for.

        Args:
            columns: int32 [R, 1 + K + M]; the last M are the ids that are asked for, what the others hold is nothing.
            num_topk: K, in [0, V].
            num_valid: int32 [R], how many columns of each row count; the others are padding. None: all.
            entropy: whether to compute the rows' entropy.
            first: int32 [R], the first column; None: the most likely token.

        Returns:
            The readings, with all the columns as their `token_ids`.
        """
        if num_topk or first is not None:
            columns = columns.clone()
        if num_topk:
            columns[:, 1 : 1 + num_topk] = topk(logits, num_topk)[1]
        table = columns.shape[1] <= WIDEST_TABLE
        if first is None:
            return token_readings(logits, columns, num_valid, entropy=entropy, greedy=True, table=table)
        columns[:, 0] = first
        return token_readings(logits, columns, num_valid, entropy=entropy, table=table)._replace(token_ids=columns)

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """[R], the greatest logits; NaN where there is one."""
        return logits.amax(dim=-1)

    def topk(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k in [0, V] greatest logits of each row, as the operation `topk` gives them."""
        return topk(logits, k)

    def keep_only_(self, logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
        """Set a workspace's rows to `values` (float32 [R, W]) at these ids (int32 [R, W]), and to -inf elsewhere."""
        logits.fill_(-torch.inf)
        logits.scatter_(1, token_ids.to(torch.int64), values)

    def keep_top_p_(self, logits: torch.Tensor, top_p: torch.Tensor) -> None:
        """As the operation `keep_top_p_`, on a workspace's rows."""
        keep_top_p_(logits, top_p)

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        maxima: list[torch.Tensor],
    ) -> Drawn:
        """Draw one token of each of a workspace's rows; the first arguments are those of `gumbel.draw`.

        Args:
            maxima: float32 [R] each, maxima over this rank's logits.
        """
        token_ids, _ = draw(logits, temperature, seeds, positions)
        drawn = logits.gather(1, token_ids[:, None].to(torch.int64)).squeeze(1)
        return Drawn(token_ids, drawn, maxima)


WHOLE = WholeVocab()
