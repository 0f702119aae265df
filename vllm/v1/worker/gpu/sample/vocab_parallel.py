"""Reading and drawing from rows of logits of which every rank has a slice, by exchange of a few numbers a row.

A rank reduces its slice to maximum, log-sum-exp, argmax, the logits of the tokens that it owns, and its most likely
tokens. One all_gather joins these; every rank then has every requested logit and counts how many of its own exceed
each, and the sums of the counts are the ranks. All ranks compute the same results from equal numbers.

Whole rows are gathered only for about as many values: most of the vocabulary, or a nucleus of very many tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.communicator import Communicator
from vllm.distributed.vocab_slice import VocabSlice
from vllm.ops.count_above import count_above
from vllm.ops.token_bitmask import keep_bits_
from vllm.ops.token_readings import RowReadings
from vllm.ops.top_p import keep_top_p_
from vllm.ops.topk import topk
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample.vocab import WHOLE, Drawn, WholeVocab, draw, statistics

# Larger nuclei need whole rows.
_MAX_NUCLEUS = 256


def vocab_of(vocab_size: int, group: Communicator) -> WholeVocab:
    """The part of a row of logits that a rank has: all of it, or a slice."""
    return WHOLE if group.world_size == 1 else SlicedVocab(VocabSlice(vocab_size, group))


class SlicedVocab(WholeVocab):
    """N ranks: the logits [R, V_rank] are of this rank's token ids, and every result is that of the whole rows, the
    same on all ranks. A `workspace` has one more column for every other rank's tokens, so operations on tokens need no
    mask. It holds -inf, which neither biases nor penalties change, so it is never drawn and adds no probability."""

    def __init__(self, vocab_slice: VocabSlice) -> None:
        self.slice = vocab_slice
        self._vocab_size = vocab_slice.vocab_size
        self._group = vocab_slice.group
        self._first = vocab_slice.own.start
        self._num_own = len(vocab_slice.own)
        self._fewest = min(map(len, vocab_slice.ranges))

    def columns(self, token_ids: Tensor) -> Tensor:
        return self.slice.columns(token_ids, elsewhere=self._num_own)

    def keep_bits_(self, logits: Tensor, mask: Tensor, rows: Tensor) -> None:
        keep_bits_(logits[:, : self._num_own], mask, self._first, rows)

    def workspace(self, logits: Tensor) -> Tensor:
        rows = logits.new_full((len(logits), self._num_own + 1), -torch.inf)
        rows[:, : self._num_own] = logits
        return rows

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not self._num_own:
            logits = self.workspace(logits)
        own = statistics(logits)
        maxima, lses, ids = self._exchange(own.max[:, None], own.lse[:, None], own.argmax[:, None] + self._first)
        return self._argmax(maxima[..., 0], ids[..., 0]), lses[..., 0].double().logsumexp(dim=0).float()

    def log_sums(self, logits: Tensor) -> Tensor:
        (lses,) = self._exchange(statistics(logits).lse[:, None])
        return lses[..., 0].double().logsumexp(dim=0).float()

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
        if self._is_wide(columns.shape[1] + num_topk):
            whole = self.slice.gather_rows(logits)
            return super().read(whole, columns, num_topk, num_valid, entropy, first, ranks)
        # Tokens given by id; top-k and argmax come with their logits.
        named = columns[:, 1 + num_topk :]
        num_first = 0
        if first is not None:
            named, num_first = torch.cat((first[:, None], named), dim=1), 1
        own = statistics(logits, entropy)
        own_logits = logits.gather(1, self.slice.columns(named, elsewhere=0).to(torch.int64)).float()
        top_values, top_ids = topk(logits, num_topk)
        sums = torch.stack([part for part in (own.max, own.lse, own.entropy) if part is not None], dim=1)
        own_ids = own.argmax[:, None] + self._first, top_ids + self._first
        all_sums, all_argmax, all_top_ids, all_named, all_top = self._exchange(sums, *own_ids, own_logits, top_values)
        maxima, lses, *entropies = all_sums.unbind(dim=2)
        argmax = self._argmax(maxima, all_argmax[..., 0])
        top_values, top_ids = _merge(all_top, all_top_ids, num_topk)
        num_named = None if num_valid is None else num_valid - (1 + num_topk - num_first)
        named_logits, named_ranks = self._rank(logits, self.slice.of_owners(all_named, named), num_named, ranks)
        highest = maxima.amax(dim=0)
        first_ids = (argmax if first is None else first)[:, None]
        first_logits = highest[:, None] if first is None else named_logits[:, :1]
        first_ranks = torch.ones_like(first_ids) if first is None else named_ranks[:, :1]
        read = torch.cat((first_logits, top_values, named_logits[:, num_first:]), dim=1)
        all_ranks = torch.cat((first_ranks, _ranks_in_order(top_values), named_ranks[:, num_first:]), dim=1)
        if not ranks:
            all_ranks.zero_()
        token_ids = torch.cat((first_ids, top_ids, named[:, num_first:]), dim=1)
        row_entropy = _join_entropies(lses, entropies[0]) if entropy else None
        lse = lses.double().logsumexp(dim=0).float()
        return RowReadings(read, all_ranks, lse, argmax, highest, row_entropy, token_ids=token_ids)

    def highest(self, logits: Tensor) -> Tensor:
        return self._group.all_gather(logits.amax(dim=-1)).amax(dim=0)

    def topk(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self._is_wide(2 * k):
            return topk(self.slice.gather_rows(logits), k)
        values, token_ids = topk(logits, k)
        all_values, all_ids = self._exchange(values, token_ids + self._first)
        return _merge(all_values, all_ids, k)

    def keep_only_(self, logits: Tensor, token_ids: Tensor, values: Tensor) -> None:
        super().keep_only_(logits, self.columns(token_ids), values)
        logits[:, self._num_own] = -torch.inf

    def keep_top_p_(self, logits: Tensor, top_p: Tensor) -> None:
        if self._is_wide(2 * _MAX_NUCLEUS):
            self._keep_top_p_of_whole_rows_(logits, top_p, np.arange(len(logits)))
            return
        values, token_ids = topk(logits, _MAX_NUCLEUS)
        lse = statistics(logits).lse[:, None]
        lses, all_values, all_ids = self._exchange(lse, values, token_ids + self._first)
        values, token_ids = _merge(all_values, all_ids, _MAX_NUCLEUS)
        # `top_p` of the whole probability, as a share of these tokens'.
        more = lses[..., 0].double().logsumexp(dim=0) - values.double().logsumexp(dim=1)
        top_p_within = top_p.double() * more.exp()
        is_within = (top_p_within < 1).cpu().numpy()
        rows = np.flatnonzero(is_within)
        if rows.size:
            index = upload(rows, logits.device)
            values, token_ids, part = values[index], token_ids[index], logits[index]
            keep_top_p_(values, top_p_within[index].float())
            self.keep_only_(part, token_ids, values)
            logits[index] = part
        self._keep_top_p_of_whole_rows_(logits, top_p, np.flatnonzero(~is_within))

    def _keep_top_p_of_whole_rows_(self, logits: Tensor, top_p: Tensor, rows: np.ndarray) -> None:
        if not rows.size:
            return
        index = upload(rows, logits.device)
        whole = self.slice.gather_rows(logits[index])
        keep_top_p_(whole, top_p[index])
        self.put_rows_(logits, index, whole)

    def put_rows_(self, logits: Tensor, index: Tensor, whole: Tensor) -> None:
        """Set a workspace's rows (int64 [G]) to this rank's slice of whole rows [G, V]."""
        logits[index, : self._num_own] = whole[:, self._first : self._first + self._num_own]

    def draw(
        self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, maxima: list[Tensor]
    ) -> Drawn:
        token_ids, scores = draw(logits, temperature, seeds, positions, self._first)
        drawn = logits.gather(1, (token_ids - self._first)[:, None].to(torch.int64))
        all_scores, all_ids, all_drawn, all_maxima = self._exchange(
            scores[:, None], token_ids[:, None], drawn, torch.stack(maxima, dim=1)
        )
        # The lowest rank among equals has the lowest id.
        best = all_scores == all_scores.amax(dim=0)
        ranks = torch.arange(len(best), device=logits.device)[:, None, None]
        winner = torch.where(best, ranks, len(best) - 1).amin(dim=0, keepdim=True)
        token_ids, drawn = (each.gather(0, winner)[0, :, 0] for each in (all_ids, all_drawn))
        return Drawn(token_ids, drawn, list(all_maxima.amax(dim=0).unbind(dim=1)))

    def _is_wide(self, num_words: int) -> bool:
        """Whether a whole row is little more to move than `num_words`. If not, a slice has at least as many tokens."""
        return 2 * num_words >= self._fewest

    def _exchange(self, *parts: Tensor) -> list[Tensor]:
        """Every rank's parts: [N, R, W] for each float32 or int32 [R, W], in one collective."""
        gathered = self._group.all_gather(torch.cat([part.view(torch.int32) for part in parts], dim=1))
        pieces = gathered.split([part.shape[1] for part in parts], dim=2)
        return [piece.view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]

    def _argmax(self, maxima: Tensor, token_ids: Tensor) -> Tensor:
        """int32 [R] from the ranks' maxima and their ids, both [N, R]. A valid id even where there is NaN."""
        return torch.where(maxima == maxima.amax(dim=0), token_ids, self._vocab_size - 1).amin(dim=0)

    def _rank(self, logits: Tensor, values: Tensor, num_valid: Tensor | None, counts: bool) -> tuple[Tensor, Tensor]:
        (
            """float32 [R, W] values, of which a row's first `num_valid` count, and their ranks int32 [R, W];
        0 unless it `counts`."""
            ""
        )
        if not values.shape[1]:
            return values, values.to(torch.int32)
        ranks = torch.zeros_like(values, dtype=torch.int32)
        if counts:
            ranks = 1 + self._group.all_reduce(count_above(logits, values, num_valid))
        if num_valid is None:
            return values, ranks
        padding = torch.arange(values.shape[1], device=values.device) >= num_valid[:, None]
        return values.masked_fill(padding, 0.0), ranks.masked_fill_(padding, 0)


def _merge(values: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of the ranks' [N, R, k], each rank's in order: values and ids [R, k], ties by the lower id."""
    num_rows = values.shape[1]
    values = values.transpose(0, 1).reshape(num_rows, -1)
    token_ids = token_ids.transpose(0, 1).reshape(num_rows, -1)
    # Stable: equals stay in the order of ranks and so of ids.
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :k].contiguous(), token_ids.gather(1, order[:, :k])


def _ranks_in_order(values: Tensor) -> Tensor:
    """int32 [R, K], the ranks of a row's K greatest values in order: ties share the better rank."""
    falling = (-values).contiguous()
    return 1 + torch.searchsorted(falling, falling, out_int32=True)


def _join_entropies(lses: Tensor, entropies: Tensor) -> Tensor:
    """float32 [R] from the slices' [N, R]: the entropy of a mixture, sum of w (H - ln w), w the slices' probability."""
    total = lses.double().logsumexp(dim=0)
    log_weights = lses.double() - total
    terms = log_weights.exp() * (entropies.double() - log_weights)
    entropy = terms.masked_fill(lses == -torch.inf, 0.0).sum(dim=0)
    return entropy.masked_fill(~total.isfinite(), torch.nan).clamp(min=0.0).float()
