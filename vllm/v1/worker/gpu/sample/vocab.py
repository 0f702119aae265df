"""Reading and drawing from rows of logits that hold the whole vocabulary; vocab_parallel.py does it for slices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm.logprobs.lists import WIDEST_TABLE
from vllm.ops.gumbel_sample import gumbel_sample
from vllm.ops.token_bitmask import keep_bits_
from vllm.ops.token_readings import RowReadings, token_readings
from vllm.ops.top_p import keep_top_p_
from vllm.ops.topk import topk


class Drawn(NamedTuple):
    """One token of R rows."""

    token_ids: Tensor  # int32 [R]
    logits: Tensor  # float32 [R], of these tokens
    maxima: list[Tensor]  # float32 [R] each, `WholeVocab.draw`'s maxima over the whole vocabulary


class WholeVocab:
    """One rank: its logits are all there are. Everywhere, R rows of logits are in float32, bfloat16 or float16, and in
    float32 where they are changed. Token ids are those of the vocabulary, never columns."""

    def columns(self, token_ids: Tensor) -> Tensor:
        """The tokens' columns in a `workspace`."""
        return token_ids

    def keep_bits_(self, logits: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Set a workspace's `rows`, int64 [R], to -inf where a token's bit in `mask`, int32 [R, ceil(V / 32)], is 0."""
        keep_bits_(logits, mask, 0, rows)

    def workspace(self, logits: Tensor) -> Tensor:
        """The rows, float32, in a form in which every token id has a column."""
        return logits

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest logits' ids, int32 [R], the lowest among equals, and the rows' log-sum-exps, float32 [R]."""
        readings = statistics(logits)
        return readings.argmax, readings.lse

    def log_sums(self, logits: Tensor) -> Tensor:
        """A workspace's rows' log-sum-exps, float32 [R]."""
        return statistics(logits).lse

    def read(
        self,
        logits: Tensor,
        columns: Tensor,
        num_topk: int,
        num_valid: Tensor | None,
        entropy: bool = False,
        first: Tensor | None = None,
        ranks: bool = True,
    ) -> RowReadings:
        """Read each row's first token (`first`, int32 [R]; None: the most likely one), its K = `num_topk` most likely
        ones by descending logit, K in [0, V], and M requested ids: the last M of `columns`, int32 [R, 1 + K + M], of
        which the others are ignored. Of a row's columns the first `num_valid`, int32 [R], count (None: all); the others
        are padding. The readings have all the columns as their `token_ids`. Without `ranks` those are 0."""
        if first is not None:
            columns = columns.clone()
            columns[:, 0] = first
        readings = token_readings(
            logits,
            columns,
            num_valid,
            entropy=entropy,
            greedy=first is None,
            table=columns.shape[1] <= WIDEST_TABLE,
            num_topk=num_topk,
            ranks=ranks,
        )
        return readings if readings.token_ids is not None else readings._replace(token_ids=columns)

    def highest(self, logits: Tensor) -> Tensor:
        """[R], the greatest logits; NaN where there is one."""
        return logits.amax(dim=-1)

    def topk(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k in [0, V] greatest logits of each row, as `ops.topk`."""
        return topk(logits, k)

    def keep_only_(self, logits: Tensor, token_ids: Tensor, values: Tensor) -> None:
        """Set a workspace's rows to `values` (float32 [R, W]) at these ids (int32 [R, W]), and to -inf elsewhere."""
        logits.fill_(-torch.inf)
        logits.scatter_(1, token_ids.to(torch.int64), values)

    def keep_top_p_(self, logits: Tensor, top_p: Tensor) -> None:
        """`ops.top_p.keep_top_p_` on a workspace's rows."""
        keep_top_p_(logits, top_p)

    def draw(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, maxima: list[Tensor]
    ) -> Drawn:
        """Draw one token of each of a workspace's rows, by `draw`; `maxima`, float32 [R] each, are over this rank's
        logits."""
        token_ids, _ = draw(logits, temperature, seeds, positions)
        drawn = logits.gather(1, token_ids[:, None].to(torch.int64)).squeeze(1)
        return Drawn(token_ids, drawn, maxima)


WHOLE = WholeVocab()


def statistics(logits: Tensor, entropy: bool = False) -> RowReadings:
    """Readings of no tokens: maximum, argmax, log-sum-exp and, if wanted, entropy of each row."""
    no_ids = torch.empty((len(logits), 0), dtype=torch.int32, device=logits.device)
    return token_readings(logits, no_ids, entropy=entropy)


def draw(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """One token a row. The noise is a function of (seed, position, token id) alone, so a request draws the same token
    in any batch, however its prompt was chunked and however often it was preempted. `logits` are float32 [R, V], column
    0 of token id `first_id`, and -inf = ruled out; `temperature` float32 [R], 0 = the most likely token, the lowest id
    among equals; `seeds` int64 [R]; `positions` int64 [R], the number of tokens before the drawn one. Returns token ids
    int32 [R] and their scores float32 [R]: of several slices the greatest one's token counts."""
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    return gumbel_sample(logits, temperature, seeds, positions, rows, first_id)
