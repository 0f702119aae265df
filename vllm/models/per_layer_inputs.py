"""Inputs of a token to each layer, from an embedding of their own (Gemma 3n and 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vllm.layers.activation import get_act_fn
from vllm.layers.linear import ReplicatedLinear
from vllm.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.models.norms import make_norm
from vllm.models.spec import NormSpec, PerLayerInputSpec


class PerLayerInputs(nn.Module):
    """Each layer's own input: a token's second embedding plus a projection of its first one. Tokens beyond the second
    vocabulary have its first row."""

    def __init__(self, spec: PerLayerInputSpec, num_layers: int, hidden_size: int, norm: NormSpec) -> None:
        super().__init__()
        self.size, self.vocab_size, self.num_layers = spec.size, spec.vocab_size, num_layers
        width = num_layers * spec.size
        self.embed_tokens_per_layer = VocabParallelEmbedding(spec.vocab_size, width)
        self.projection = ReplicatedLinear(hidden_size, width, False, "per_layer_model_projection")
        self.per_layer_projection_norm = make_norm(norm, spec.size)
        self._projection_scale = hidden_size**-0.5

    def forward(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """int [T] and embeddings [T, H] -> [T, P] for each layer."""
        own = self.embed_tokens_per_layer(ids.where(ids < self.vocab_size, 0))
        own = own * torch.tensor(math.sqrt(self.size), dtype=own.dtype, device=own.device)
        projected = self.projection(hidden) * self._projection_scale
        projected = self.per_layer_projection_norm(projected.view(-1, self.num_layers, self.size))
        return ((projected + own.view_as(projected)) * math.sqrt(0.5)).unbind(1)


class LayerInput(nn.Module):
    """A layer's own input, added to the residual stream, by which it is gated: norm(up(act(gate(x)) * given))."""

    def __init__(self, spec: PerLayerInputSpec, hidden_size: int, norm: NormSpec) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(hidden_size, spec.size, False, "per_layer_input_gate")
        self.up = ReplicatedLinear(spec.size, hidden_size, False, "per_layer_projection")
        self.post_per_layer_input_norm = make_norm(norm, hidden_size)
        self.act_fn = get_act_fn(spec.activation)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        """[T, H] and [T, P] -> [T, H]."""
        return self.post_per_layer_input_norm(self.up(self.act_fn(self.gate(x)) * given))
