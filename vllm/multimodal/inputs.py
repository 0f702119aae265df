"""Types of media, for annotations and isinstance checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.inputs.data import MultiModalDataDict, MultiModalUUIDDict

ModalityData = Any
NestedTensors = Any
BatchedTensorInputs = dict[str, Any]


@dataclass(frozen=True)
class PlaceholderRange:
    """The prompt tokens, `length` from `offset` on, in whose place an item's embeddings stand."""

    offset: int
    length: int
    is_embed: Any = None

    def get_num_embeds(self) -> int:
        """How many of them are replaced."""
        return self.length if self.is_embed is None else int(self.is_embed.sum().item())


class MultiModalKwargs(dict[str, Any]):
    """What a processor makes of media: none does here."""


class MultiModalKwargsItem(dict[str, Any]):
    """The same of one item."""


__all__ = [
    "BatchedTensorInputs",
    "ModalityData",
    "MultiModalDataDict",
    "MultiModalKwargs",
    "MultiModalKwargsItem",
    "MultiModalUUIDDict",
    "NestedTensors",
    "PlaceholderRange",
]
