"""Rows that tokens of a step begin with in place of their embeddings."""

from __future__ import annotations

from torch import Tensor


class InputRows:
    """The rows that are given for one forward pass. A model calls it where transformers' would take `inputs_embeds`."""

    def __init__(self) -> None:
        self._given: tuple[Tensor, Tensor] | None = None

    def give(self, tokens: Tensor, values: Tensor) -> None:
        """The step's tokens of these numbers, int64 [N], begin with `values`, [N, W] in the model's dtype."""
        self._given = tokens, values

    def clear(self) -> None:
        """All tokens begin with their own embeddings again."""
        self._given = None

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Embeddings of the step's tokens, [T, W] or [1, T, W], with the given ones in their places."""
        if self._given is None:
            return embeddings
        return embeddings.flatten(0, -2).index_copy(0, *self._given).view_as(embeddings)
