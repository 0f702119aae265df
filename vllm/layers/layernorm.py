"""Normalisation layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.distributed.communicator import Communicator
from vllm.layers.sharding import Shard, WeightSlot
from vllm.ops.layer_norm import fused_add_layer_norm_, layer_norm
from vllm.ops.rms_norm import AddedNorm, rms_norm


class AdaptableNorm(nn.Module):
    """A norm whose weight and bias may be others for some rows, unless not `takes_adapters`."""

    takes_adapters = True
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        # AdaptedNorm does it again for rows whose adapters have their own.
        self.adapters: Any = None

    @abstractmethod
    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's tensors go."""

    @property
    def empty(self) -> Tensor:
        """[0], of the weight's dtype and on its device."""
        assert self.weight is not None
        return self.weight.data.new_empty(0)

    def adapted(self, normalise: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """normalise(*rows, weight, bias)."""
        out = normalise(*rows, self.weight, self.bias)
        return out if self.adapters is None else self.adapters(normalise, out, *rows)


class _Norm(AdaptableNorm):
    """Weight and bias of a norm over `shape`; `offset` is added to the checkpoint's weight, in float32, as 1 + w has
    digits that a half precision w lacks. With `heads`, a weight [heads held, size]."""

    def __init__(
        self,
        size: int,
        eps: float,
        weight: bool = True,
        bias: bool = False,
        offset: float = 0.0,
        heads: Shard | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self._offset = offset
        self._shards = (Shard.whole(size),) if heads is None else (heads, Shard.whole(size))
        shape = tuple(len(shard.held) for shard in self._shards)
        dtype = torch.float32 if offset else None
        self.shape = (size,)
        self.prepare: Callable[[Tensor], Tensor] | None = None
        self.weight = None
        self.bias = None
        # `adding_to` needs a weight for all rows.
        self._can_be_added = weight and heads is None
        if weight:
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    @property
    def can_be_added(self) -> bool:
        """Whether `adding_to` may be used."""
        return self._can_be_added and (self.adapters is None or not self.adapters.is_used)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's weight and bias go."""
        slots = {}
        if self.weight is not None:
            slots["weight"] = WeightSlot(self.weight.data, self._shards, self._prepared_weight)
        if self.bias is not None:
            slots["bias"] = WeightSlot(self.bias.data, self._shards, self.prepare)
        return slots

    def _prepared_weight(self, weight: Tensor) -> Tensor:
        if self._offset:
            weight = weight.float() + self._offset
        return weight if self.prepare is None else self.prepare(weight)


class RMSNorm(_Norm):
    """x / rms(x) * (weight + offset) over the last dimension, computed in float32; with `heads`, a weight a head."""

    def __init__(self, size: int, eps: float, *args: Any, **options: Any) -> None:
        super().__init__(size, eps, *args, **options)
        self._ones = None if self.weight is not None else torch.ones(self.shape, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        if self.adapters is not None:
            return self.adapted(self._normalise, x)
        weight = self.weight if self._ones is None else self._ones
        assert weight is not None
        return self._normalise(x, weight)

    def _normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dim() == 1:
            return rms_norm(x, weight, self.eps)
        return (F.rms_norm(x.float(), self.shape, None, self.eps) * weight.float()).to(x.dtype)

    def adding_to(self, residual: Tensor) -> AddedNorm:
        """A function that adds x to `residual` in place, both [T, H], and normalises the sum; linear layers take it to
        apply it before their product."""
        assert self.weight is not None
        return AddedNorm(residual, self.weight, self.eps)


class LayerNorm(_Norm):
    """(x - mean) / std * (weight + offset) + bias over the last dimension, computed in float32; with `heads`, a weight
    and bias a head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(self._normalise, x)

    def _normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return layer_norm(x, weight, bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += x in place, both [T, H]; the norm of the sum."""
        out = fused_add_layer_norm_(x, residual, self.weight, self.bias, self.eps)
        return out if self.adapters is None else self.adapters(self._normalise, out, residual)


class HeadLayerNorms(LayerNorm):
    """LayerNorm with a weight a head and no bias, whose checkpoint has a tensor for each head, `norms.N.weight`."""

    def __init__(self, size: int, eps: float, heads: Shard) -> None:
        super().__init__(size, eps, heads=heads)
        self._heads = heads

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the heads' weights go; those of other ranks' heads go nowhere."""
        assert self.weight is not None
        slots, (size,) = {}, self.shape
        for head in range(self._heads.size):
            own, columns = self.weight.data.new_empty(0), Shard(size, range(0))
            if head in self._heads.held:
                own, columns = self.weight.data[head - self._heads.held.start], Shard.whole(size)
            slots[f"norms.{head}.weight"] = WeightSlot(own, (columns,))
        return slots


class ShardedRMSNorm(AdaptableNorm):
    """RMSNorm over the width of all heads, of which a rank holds some: [T, heads held, D], same shape. `num_copies`
    ranks hold each head."""

    def __init__(self, width: Shard, eps: float, group: Communicator, num_copies: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(width.held)), requires_grad=False)
        self.bias = None
        self.eps, self._width, self._group, self._num_copies = eps, width, group, num_copies

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's weight goes."""
        assert self.weight is not None
        return {"weight": WeightSlot(self.weight.data, (self._width,))}

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(self._normalise, x)

    def _normalise(self, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        if self._group.world_size == 1:
            return rms_norm(x.flatten(1), weight, self.eps).view(x.shape)
        wide = x.flatten(1).float()
        squares = self._group.all_reduce(wide.square().sum(-1, keepdim=True)) / self._num_copies
        scale = torch.rsqrt(squares / self._width.size + self.eps)
        return (wide * scale * weight.float()).to(x.dtype).view(x.shape)
