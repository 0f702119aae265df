"""The slice of the vocabulary that a rank's head computes, and the exchanges between slices."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.distributed.communicator import Communicator, split_vocab


class VocabSlice:
    """The token ids of each rank of `group` (`ranges`, as `split_vocab` gives them, maybe empty) and this rank's
    (`own`)."""

    def __init__(self, vocab_size: int, group: Communicator) -> None:
        self.group = group
        self.ranges = split_vocab(vocab_size, group.world_size)
        self.own = self.ranges[group.rank]
        self.vocab_size = vocab_size

    def columns(self, token_ids: Tensor, elsewhere: int) -> Tensor:
        """The ids' (any shape) columns in this rank's logits; `elsewhere` for ids of other ranks."""
        columns = token_ids - self.own.start
        return columns.masked_fill_((columns < 0) | (columns >= len(self.own)), elsewhere)

    def owners(self, token_ids: Tensor) -> Tensor:
        """int64, the rank of each id (any shape)."""
        starts = [own.start for own in self.ranges[1:]]
        return sum((token_ids >= start for start in starts), start=torch.zeros_like(token_ids, dtype=torch.int64))

    def of_owners(self, parts: Tensor, token_ids: Tensor) -> Tensor:
        """[R, W]: of every rank's values [N, R, W], those of the rank that owns each id (int [R, W])."""
        return parts.gather(0, self.owners(token_ids)[None]).squeeze(0)

    def join_columns(self, values: Tensor, token_ids: Tensor) -> Tensor:
        """On every rank, the owners' values [R, W] for the ids (int [W])."""
        return self.of_owners(self.group.all_gather(values), token_ids.expand(values.shape))

    def gather_columns(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Chosen tokens' logits [R, W] on every rank, from logits [R, at least this rank's ids] and ids int [W], the
        same on all ranks. Each rank sends R * W values."""
        if len(self.own):
            values = logits.index_select(1, self.columns(token_ids, elsewhere=0))
        else:
            values = logits.new_zeros((len(logits), len(token_ids)))
        return self.join_columns(values, token_ids)

    def gather_rows(self, logits: Tensor) -> Tensor:
        """Whole rows [R, V] on every rank, from slices [R, at least this rank's ids]."""
        if self.group.world_size == 1:
            return logits
        widest = max(map(len, self.ranges))
        part = logits.new_zeros((len(logits), widest))
        part[:, : len(self.own)] = logits[:, : len(self.own)]
        parts = self.group.all_gather(part)
        return torch.cat([part[:, : len(own)] for part, own in zip(parts, self.ranges, strict=True)], dim=1)
