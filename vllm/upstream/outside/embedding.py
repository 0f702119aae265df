"""Upstream's embedding, head and logits processor: ours, split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.distributed.vocab_slice import VocabSlice
from vllm.layers import vocab_parallel_embedding as base
from vllm.upstream.outside.linear import KindOfOurs, parameters_of
from vllm.upstream.outside.refused import refuse_quantization
from vllm.upstream.outside.weights import fill, set_loader

DEFAULT_VOCAB_PADDING_SIZE = 64


class _LoadsRows:
    """A part of the rows of a vocabulary, filled by upstream's models."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None = None
    prefix: str

    def _use_loaders(self) -> None:
        set_loader(self.weight, self.weight_loader, output_dim=0, input_dim=1)
        set_loader(self.bias, self.weight_loader, output_dim=0)

    def weight_loader(self, param: Tensor, loaded_weight: Tensor) -> None:
        """Take the rank's part of a checkpoint's tensor. ValueError: it has another shape."""
        kind = "bias" if param is self.bias else "weight"
        slots: dict[str, Any] = self.checkpoint_slots()  # type: ignore[attr-defined]
        fill(slots[kind], loaded_weight, self.prefix or "the embedding")

    def _name_sizes(self, num_embeddings: int, embedding_dim: int, prefix: str) -> None:
        self.num_embeddings = self.org_vocab_size = num_embeddings
        self.num_embeddings_padded = self.org_vocab_size_padded = num_embeddings
        self.num_embeddings_per_partition = len(self.vocab_range)  # type: ignore[attr-defined]
        self.embedding_dim, self.prefix = embedding_dim, prefix
        self.tp_size = self.group.world_size  # type: ignore[attr-defined]


class VocabParallelEmbedding(_LoadsRows, base.VocabParallelEmbedding, metaclass=KindOfOurs):
    """A row for each token, the same on every rank. It may serve as the head, too.

    Args:
        num_embeddings: tokens.
        embedding_dim: values of a row.
        org_num_embeddings, padding_size: of upstream's padding; there is none here.
        prefix: the layer's name in its model.
    """

    ours = base.VocabParallelEmbedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        refuse_quantization(quant_config, prefix)
        with parameters_of(params_dtype):
            super().__init__(num_embeddings, embedding_dim)
        self._name_sizes(num_embeddings, embedding_dim, prefix)
        # In a tuple: it is the model's child, which packs it.
        self.head: tuple[base.ParallelLMHead | None] = (None,)
        self._use_loaders()

    def begin_update(self) -> bool:
        is_new = super().begin_update()
        self._use_loaders()
        return is_new

    def forward(self, input_ids: Tensor) -> Tensor:
        """int [T] -> [T, H]."""
        if input_ids.dim() == 1:
            return super().forward(input_ids)
        return super().forward(input_ids.flatten()).view(*input_ids.shape, -1)


class ParallelLMHead(_LoadsRows, base.ParallelLMHead, metaclass=KindOfOurs):
    """The head: see VocabParallelEmbedding for its arguments. LogitsProcessor multiplies with it."""

    ours = base.ParallelLMHead

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        refuse_quantization(quant_config, prefix)
        with parameters_of(params_dtype):
            super().__init__(num_embeddings, embedding_dim, bias=bias)
        self._name_sizes(num_embeddings, embedding_dim, prefix)
        self._use_loaders()

    def tie_weights(self, embed_tokens: base.VocabParallelEmbedding) -> ParallelLMHead:
        """Multiply with the embedding's weight from now on; returns itself."""
        self._tied_to, self.weight = (embed_tokens,), None
        return self

    def take_shared_weight(self, model: nn.Module) -> None:
        """Become the head of the embedding whose parameter the model made this head's."""
        if self.weight is not None and self.tied_to is None:
            for module in model.modules():
                if isinstance(module, base.VocabParallelEmbedding) and module.weight is self.weight:
                    self.tie_weights(module)
                    return

    def begin_update(self) -> bool:
        if self.tied_to is not None:
            # The embedding's weight is this head's.
            if self._has_bias:
                self.bias = self._new_bias()
            self._use_loaders()
            return True
        is_new = super().begin_update()
        self._use_loaders()
        return is_new


class LogitsProcessor(nn.Module):
    """Logits of hidden states.

    Args:
        vocab_size: of the head.
        org_vocab_size: tokens that have logits; None = vocab_size.
        logits_as_input: what it is given are logits.
        scale: factor on the logits, before the bound.
        soft_cap: bound c, c * tanh(logit / c); None: none.
    """

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        logits_as_input: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.org_vocab_size = vocab_size, org_vocab_size or vocab_size
        self.logits_as_input, self.scale, self.soft_cap = logits_as_input, scale, soft_cap

    def forward(
        self, lm_head: Any, hidden_states: Tensor, *others: Any, embedding_bias: Tensor | None = None
    ) -> Tensor:
        """Whole rows of logits, float32 [L, V], on every rank.

        Args:
            lm_head: ParallelLMHead, or the embedding whose weight is its.
            hidden_states: [L, H], or logits.
            others: the bias, and what former models hand on; see `embedding_bias`.
            embedding_bias: added to the products.
        """
        logits = hidden_states if self.logits_as_input else self._product(lm_head, hidden_states)
        bias = next((each for each in (embedding_bias, *others) if isinstance(each, Tensor)), None)
        if bias is not None:
            logits = logits + bias.float()
        logits = logits[..., : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.scale == 1.0 else logits * self.scale

    def _product(self, lm_head: Any, hidden: Tensor) -> Tensor:
        head = lm_head.head[0] if isinstance(lm_head, VocabParallelEmbedding) else lm_head
        if not isinstance(head, base.ParallelLMHead):
            raise TypeError(f"LogitsProcessor: lm_head must be a ParallelLMHead or its embedding, got {type(head)}")
        return VocabSlice(head.vocab_size, head.group).gather_rows(head(hidden))
