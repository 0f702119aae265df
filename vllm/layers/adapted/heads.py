"""Latent attention's `kv_b_proj` for rows with adapters: queries go through B and A to latents, weighted latents
through A and B to values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm.layers.adapted.products import LayerChange, StepAdapters
from vllm.layers.latent_attention import LatentHeads
from vllm.ops.head_linear import PackedHeads, head_linear, pack_heads
from vllm.ops.packed_linear import PackedLinear, pack_linear, packed_linear


@dataclass
class _Own:
    """One adapter's parts: s B of each head's keys, turned, and of its values; A and A turned."""

    keys: PackedHeads
    values: PackedHeads
    to_latent: PackedLinear
    from_latent: PackedLinear


class AdaptedHeads:
    """LatentHeads calls this with its results. Attributes as AdaptedNorm's."""

    def __init__(self, layer: LatentHeads, step: StepAdapters) -> None:
        self.is_used = False
        self._sizes = layer.nope_dim, layer.value_dim
        self._num_heads, self._step = layer.num_heads, step
        self._parts: dict[int, _Own] = {}  # by row

    def put(self, row: int, change: LayerChange | None) -> bool:
        """Make an adapter's change that of `row`. False: its steps are never recorded."""
        self._parts.pop(row, None)
        if change is not None:
            (part,) = change.parts.values()
            keys, values = (part.b * part.scale).unflatten(0, (self._num_heads, -1)).split(self._sizes, dim=1)
            packed = pack_linear(part.a.T.contiguous(), None), pack_linear(part.a.clone(), None)
            self._parts[row] = _Own(pack_heads(keys.transpose(1, 2)), pack_heads(values), *packed)
            self.is_used = True
        return False

    def changes(self, num_rows: int) -> bool:
        """Whether one of a step's rows has such an adapter."""
        rows = self._step.of(num_rows) if self._parts else None
        return rows is not None and any(len(rows.of(adapter)) for adapter in self._parts)

    def add_to_latents(self, out: Tensor, q: Tensor) -> Tensor:
        """`out` [T, H, latent_dim], of queries [T, H, nope_dim], with what adapters add, in place."""
        rows = self._step.of(len(out)) if self._parts else None
        if rows is not None:
            for adapter, own in self._parts.items():
                taken = rows.of(adapter)
                if len(taken):
                    inner = head_linear(q[taken], own.keys)
                    out[taken] += packed_linear(inner.flatten(0, 1), own.to_latent).view(-1, *out.shape[1:])
        return out

    def add_to_values(self, out: Tensor, latent: Tensor) -> Tensor:
        """`out` [T, H, value_dim], of weighted latents [T, H, latent_dim], the same."""
        rows = self._step.of(len(out)) if self._parts else None
        if rows is not None:
            for adapter, own in self._parts.items():
                taken = rows.of(adapter)
                if len(taken):
                    inner = packed_linear(latent[taken].flatten(0, 1), own.from_latent)
                    out[taken] += head_linear(inner.view(len(taken), self._num_heads, -1), own.values)
        return out
