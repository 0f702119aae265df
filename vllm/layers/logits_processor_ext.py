"""Logits of chosen token ids, beside all others or alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.vocab_slice import VocabSlice
from vllm.exceptions import VLLMValidationError, shown
from vllm.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.utils.checks import check_list, check_token_id


def check_indices(name: str, indices: Any, vocab_size: int | None = None) -> list[int]:
    """The argument `name` as Python ints, in the order given; repeated ones stay. VLLMValidationError unless it is a
    list, tuple, range, integer array or tensor of ids in [0, vocab_size), where None = no limit yet."""
    ids = [check_token_id(name, element) for element in check_list(name, indices, "a list of integers")]
    for index in ids:
        if index < 0 or (vocab_size is not None and index >= vocab_size):
            limits = "at least 0" if vocab_size is None else f"in [0, {vocab_size}), the model's vocabulary"
            raise VLLMValidationError(f"{name} must be {limits}; got {shown(index)}", name, index)
    return ids


class LogitsProcessorWithIndexedOutput(nn.Module):
    """Logits, and those of chosen token ids: column i of the indexed logits is of `return_indices[i]`.

    Ranks that share the head all make the same calls. Each gets its own part of the logits, and the chosen ones of the
    whole vocabulary of `vocab_size` ids: only these are exchanged. VLLMValidationError for an index that is no integer
    in [0, vocab_size); ValueError from each method if the head has another vocabulary.
    """

    def __init__(self, vocab_size: int, return_indices: Iterable[int]) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.return_indices = check_indices("return_indices", return_indices, vocab_size)
        self._columns = torch.tensor(self.return_indices, dtype=torch.int64)
        self._source: Any = None
        self._taken: Any = None
        self._own_positions: Tensor  # of this rank's return_indices

    def forward(self, lm_head: ParallelLMHead, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """All logits of hidden states [L, H] in the head's dtype, and the chosen ones among them.

        Returns:
            float32 logits [L, V], of several ranks [L, V_rank] (`lm_head.vocab_range`); and indexed logits, float32
            [L, I] on every rank: the same numbers.
        """
        vocab_slice = self._slice_of(lm_head)
        logits = lm_head(hidden_states)
        return logits, vocab_slice.gather_columns(logits, self._columns.to(logits.device))

    def indexed_logits(self, lm_head: ParallelLMHead, hidden_states: Tensor) -> Tensor:
        """The chosen logits alone, float32 [L, I], on every rank.

        Only the chosen rows of the head are multiplied with. They are copied at the first call and kept: I * H values,
        rounded up to 32 rows on CPU. With our packed layout the result has the bits of the head's; with a plain
        weight (CUDA) it may differ by the rounding of the order of sums.
        """
        if getattr(lm_head.adapters, "is_used", False):
            # They may change any of its rows.
            return self(lm_head, hidden_states)[1]
        vocab_slice = self._slice_of(lm_head)
        if self._source is not lm_head.packed:
            self._take_rows(lm_head)
        own = lm_head.bound(lm_head.method.apply(hidden_states, self._taken, float_out=True))
        if lm_head.group.world_size == 1:
            return own
        values = own.new_zeros((len(own), len(self.return_indices)))
        values[:, self._own_positions] = own
        return vocab_slice.join_columns(values, self._columns.to(own.device))

    def _take_rows(self, lm_head: ParallelLMHead) -> None:
        own = lm_head.vocab_range
        device = lm_head._like.device
        positions = [position for position, index in enumerate(self.return_indices) if index in own]
        rows = [self.return_indices[position] - own.start for position in positions]
        self._own_positions = torch.tensor(positions, dtype=torch.int64, device=device)
        self._taken = lm_head.method.take_rows(lm_head.packed, torch.tensor(rows, dtype=torch.int64, device=device))
        self._source = lm_head.packed

    def _slice_of(self, lm_head: ParallelLMHead) -> VocabSlice:
        if lm_head.vocab_size != self.vocab_size:
            raise ValueError(f"lm_head has {lm_head.vocab_size} outputs, but vocab_size is {self.vocab_size}")
        return VocabSlice(self.vocab_size, lm_head.group)
