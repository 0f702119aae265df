"""Latent attention: its rows into the cache, attention over them, and what widens latents to each head's values."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.attention.options import AttentionOptions
from vllm.layers.attention import Attention
from vllm.layers.linear import UNQUANTIZED, ColumnParallelLinear
from vllm.layers.linear_method import LinearMethod
from vllm.layers.sharding import WeightSlot
from vllm.ops.head_linear import PackedHeads, head_linear, pack_heads
from vllm.ops.latent_attention import latent_attention, write_latent_


class LatentAttention(Attention):
    """Causal attention of this rank's heads over rows that all heads share: see `vllm.ops.latent_attention`. It runs on
    our kernels, whatever the backend.

    Args:
        row_dim: size of a row, its latent and its rotated key.
        scale: factor on the scores.
    """

    is_latent: ClassVar[bool] = True

    def __init__(self, row_dim: int, scale: float) -> None:
        super().__init__(row_dim, options=AttentionOptions(scale), num_kv_heads=1)

    def forward(  # type: ignore[override]
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        rope: Tensor,
        kv_cache: tuple[Tensor, ...],
        attn: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Store this step's rows, then attend: weighted latents [T or L, H, latent_dim].

        Args:
            q_latent, q_rope: [T, H, latent_dim] and [T, H, rope_dim], rotated.
            latent, rope: [T, latent_dim] and [T, rope_dim], rotated.
            rows: int64 [L], tokens whose result is returned; None = all.
        """
        if self.kv_group:
            attn = attn.groups[self.kv_group - 1]
        (cache,) = kv_cache
        cache_scale, scale = self.options.k_scale, self.options.scale
        assert scale is not None
        write_latent_(latent, rope, cache, attn.slot_mapping, cache_scale)
        if attn.shared is not None:
            tokens, slots = attn.shared
            write_latent_(latent.index_select(0, tokens), rope.index_select(0, tokens), cache, slots, cache_scale)
        if rows is not None and not rows.shape[0]:
            return q_latent.new_empty(0, *q_latent.shape[1:])
        requests = attn.block_table, attn.query_start_loc, attn.seq_lens
        out = latent_attention(q_latent, q_rope, cache, *requests, scale, cache_scale)
        return out if rows is None else out.index_select(0, rows)


class LatentHeads(ColumnParallelLinear):
    """What widens a latent to each head's keys [nope_dim] and values [value_dim], the checkpoint's `kv_b_proj`. It is
    never multiplied with latents: queries go through the keys' part to latents, and weighted latents through the
    values' part. So a quantised weight is de-quantised, as no layout multiplies by both of its dimensions."""

    def __init__(self, num_heads: int, nope_dim: int, value_dim: int, latent_dim: int) -> None:
        super().__init__(latent_dim, num_heads * (nope_dim + value_dim), False, "kv_b_proj")
        self._sizes = nope_dim, value_dim
        self.keys: PackedHeads
        self.values: PackedHeads

    @cached_property
    def num_heads(self) -> int:
        """This rank's heads."""
        return len(self.parts["kv_b_proj"].held) // sum(self._sizes)

    def queries_to_latent(self, q: Tensor) -> Tensor:
        """[T, H, nope_dim] -> [T, H, latent_dim]."""
        return head_linear(q, self.keys)

    def latent_to_values(self, latent: Tensor) -> Tensor:
        """[T, H, latent_dim] -> [T, H * value_dim]."""
        return head_linear(latent, self.values).flatten(1)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        if self._is_own:
            raise ValueError(
                f"{self.prefix}: {type(self.quant_method).__name__} cannot hold this weight, which latent attention "
                "takes apart"
            )
        return super().checkpoint_slots()

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        """Pack the loaded weight's two parts, by head, whatever the method."""
        assert self.weight is not None
        weight = self.weight.data
        for quantized in self._quantized.values():
            weight = quantized.dequantize().to(self._empty)
        self._quantized.clear()
        keys, values = weight.unflatten(0, (self.num_heads, -1)).split(self._sizes, dim=1)
        self.keys, self.values = pack_heads(keys.transpose(1, 2)), pack_heads(values)
        self.weight = None

    def begin_update(self) -> bool:
        """See LinearBase: values of both parts come from one tensor."""
        self.weight = torch.nn.Parameter(self._empty.new_empty(self._shape), requires_grad=False)
        return True

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def keeps_values(self) -> bool:
        return False
