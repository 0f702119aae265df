"""Token embeddings and the language-model head; over several ranks both would be split by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.linear_method import UNQUANTIZED, LinearMethod
from vllm.ops.embedding import embedding


class VocabParallelEmbedding(nn.Module):
    """A row of `weight` [V, H] for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int32 or int64 [T] -> [T, H]."""
        return embedding(input_ids, self.weight)


class ParallelLMHead(nn.Module):
    """Logits of hidden states: x W^T.

    Args:
        vocab_size: rows of W.
        hidden_size: width of x.
        tied_to: embedding whose weight is W. On CPU the head packs a copy of its own: looking rows up wants
            the plain layout, multiplying the packed one.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tied_to: VocabParallelEmbedding | None = None) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None
        if tied_to is None:
            self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        # In a tuple, so that the embedding is not registered as a submodule of the head, too.
        self._tied_to = (tied_to,)
        self.method: LinearMethod = UNQUANTIZED
        self.packed: Any

    def forward(self, hidden: Tensor) -> Tensor:
        """[L, H] -> [L, V], in float32 where the kernel can: rounding would make ties that are not the model's."""
        return self.method.apply(hidden, self.packed, float_out=True)

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED) -> None:
        """Pack the loaded weight as `method` does and let go of the plain one (an embedding keeps its own)."""
        (tied_to,) = self._tied_to
        weight = self.weight if tied_to is None else tied_to.weight
        assert weight is not None
        self.method = method
        self.packed = method.pack(weight.data, None, float_out=True)
        self.weight = None
