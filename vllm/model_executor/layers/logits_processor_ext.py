"""Logits of chosen token ids, beside all others or by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vllm.checks import check_list, check_token_id
from vllm.exceptions import VLLMValidationError, shown
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def check_indices(name: str, indices: Any, vocab_size: int | None = None) -> list[int]:
    """Token ids as Python ints, in the order given; repeated ones stay.

    Args:
        name: of the argument, for the error.
        indices: a list, tuple, range, integer array or tensor.
        vocab_size: their limit; None = known later.

    Raises:
        VLLMValidationError: another type, or an index outside [0, vocab_size).
    """
    ids = [check_token_id(name, element) for element in check_list(name, indices, "a list of integers")]
    for index in ids:
        if index < 0 or (vocab_size is not None and index >= vocab_size):
            limits = "at least 0" if vocab_size is None else f"in [0, {vocab_size}), the model's vocabulary"
            raise VLLMValidationError(f"{name} must be {limits}; got {shown(index)}", parameter=name, value=index)
    return ids


class LogitsProcessorWithIndexedOutput(nn.Module):
    """Logits, and those of chosen token ids apart.

    Args:
        vocab_size: V, the head's outputs.
        return_indices: I token ids; column i of the indexed logits is of `return_indices[i]`.

    Raises:
        VLLMValidationError: an index that is no integer in [0, vocab_size).
    """

    def __init__(self, vocab_size: int, return_indices: Iterable[int]) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.return_indices = check_indices("return_indices", return_indices, vocab_size)
        self._columns = torch.tensor(self.return_indices, dtype=torch.int64)
        self._source: Any = None
        self._taken: Any = None

    def forward(self, lm_head: ParallelLMHead, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """All logits and the chosen ones among them.

        Args:
            lm_head: the model's head.
            hidden_states: [L, H] in the head's dtype.

        Returns:
            logits [L, V] as the head gives them, and indexed logits, float32 [L, I]: the same numbers.

        Raises:
            ValueError: the head has another vocabulary.
        """
        self._check_head(lm_head)
        logits = lm_head(hidden_states)
        return logits, self._select(logits)

    def indexed_logits(self, lm_head: ParallelLMHead, hidden_states: Tensor) -> Tensor:
        """The chosen logits alone, float32 [L, I].

        Only the chosen rows of the head are multiplied with. They are copied out of it at the first call and kept
        for the next: I * H values, rounded up to 32 rows on CPU. With our own packed layout the result has the very
        bits of the head's; with a plain weight (CUDA) it may differ by the rounding of the order of sums. oneDNN's
        packed layout (bfloat16 on some CPUs) hides its rows: there the full product is made, and selected from.

        Args:
            lm_head: the model's head.
            hidden_states: [L, H] in the head's dtype.

        Raises:
            ValueError: the head has another vocabulary.
        """
        self._check_head(lm_head)
        if self._source is not lm_head.packed:
            self._source = lm_head.packed
            self._taken = lm_head.method.take_rows(lm_head.packed, self._columns.to(lm_head.packed.weight.device))
        if self._taken is None:
            return self._select(lm_head(hidden_states))
        return lm_head.method.apply(hidden_states, self._taken, True).float()

    def _select(self, logits: Tensor) -> Tensor:
        return logits.index_select(1, self._columns.to(logits.device)).float()

    def _check_head(self, lm_head: ParallelLMHead) -> None:
        if lm_head.packed.shape[0] != self.vocab_size:
            raise ValueError(f"lm_head has {lm_head.packed.shape[0]} outputs, but vocab_size is {self.vocab_size}")
