"""Layers with a recurrent state: a request's is one row of each of the layer's pools."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.layers.absent_modules import all_modules
from vllm.ops.rms_norm import AddedNorm


class StateShape(NamedTuple):
    """A part of one request's state on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateLayer(nn.Module):
    """A layer that carries a state from token to token.

    Args:
        state_shapes: what the layer keeps of a request.
    """

    def __init__(self, state_shapes: tuple[StateShape, ...]) -> None:
        super().__init__()
        self.state_shapes = state_shapes
        # [slots, *shape] of each part; set by the runner. A row is a request's state after the tokens computed so far;
        # of a request with none computed it may hold anything.
        self.state: tuple[Tensor, ...] = ()

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
        norm: AddedNorm | None,
    ) -> Tensor:
        """As attention's: a state needs no positions and no cache."""
        return self.mix(hidden, attn, rows, norm)

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H], or [L, H] for the tokens in `rows`."""
        raise NotImplementedError


def state_layers(model: nn.Module, with_absent: bool = False) -> list[StateLayer]:
    """A model's layers with states, in their order; `with_absent`: those of other stages, too, which have no memory."""
    modules = all_modules(model) if with_absent else model.modules()
    return [module for module in modules if isinstance(module, StateLayer)]


def state_bytes(model: nn.Module) -> int:
    """Bytes of one request's state, of all layers, on this rank."""
    return sum(part.num_bytes for layer in state_layers(model) for part in layer.state_shapes)


def allocate_states(model: nn.Module, num_slots: int, device: torch.device) -> None:
    """Give every layer pools of `num_slots` rows, untouched; 0: free them."""
    for layer in state_layers(model):
        shapes = layer.state_shapes if num_slots else ()
        layer.state = tuple(torch.empty((num_slots, *each.shape), dtype=each.dtype, device=device) for each in shapes)
