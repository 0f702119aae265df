"""Rows that tokens of a step begin with in place of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class InputRows:
    """The rows that are given for one forward pass. A model calls it where transformers' would take `inputs_embeds`."""

    def __init__(self) -> None:
        self._given: tuple[Tensor, Tensor] | None = None

    def give(self, tokens: Tensor, values: Tensor) -> None:
        """The step's tokens of these numbers, int64 [N], begin with `values`, [N, W] in the model's dtype; what was
        given of others stays."""
        if self._given is not None:
            tokens, values = torch.cat([self._given[0], tokens]), torch.cat([self._given[1], values])
        self._given = tokens, values

    def clear(self) -> None:
        """All tokens begin with their own embeddings again."""
        self._given = None

    def __call__(self, embeddings: Tensor) -> Tensor:
        """Embeddings of the step's tokens, [T, W] or [1, T, W], with the given ones in their places."""
        if self._given is None:
            return embeddings
        return embeddings.flatten(0, -2).index_copy(0, *self._given).view_as(embeddings)


class AddedRows:
    """Rows that are added to tokens of a step before some layers."""

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._values: Mapping[int, Tensor] = {}

    def give(self, tokens: Tensor, values: Mapping[int, Tensor]) -> None:
        """Before layer i the step's tokens of these numbers, int64 [N], get `values[i]`, [N, H], too."""
        self._tokens, self._values = tokens, values

    def clear(self) -> None:
        """Nothing is added any more."""
        self._tokens, self._values = None, {}

    def __contains__(self, layer: int) -> bool:
        """Whether something is added before a layer; the one after the last is the final norm."""
        return layer in self._values

    def add_to(self, stream: Tensor, layer: int) -> Tensor:
        """The residual stream before a layer, [T, H], with its rows, if it has some."""
        if layer not in self or self._tokens is None:
            return stream
        return stream.index_add(0, self._tokens, self._values[layer])
