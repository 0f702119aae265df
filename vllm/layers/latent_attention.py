"""Latent attention: its rows into the cache, attention over them, and what widens latents to each head's values."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm import envs
from vllm.attention.backend import AttentionMetadata
from vllm.attention.options import AttentionOptions
from vllm.layers.attention import Attention
from vllm.layers.linear import UNQUANTIZED, ColumnParallelLinear
from vllm.layers.linear_method import LinearMethod
from vllm.layers.sharding import WeightSlot
from vllm.ops.head_linear import PackedHeads, head_linear, pack_heads
from vllm.ops.kv_cache import kv_cache_shape, reshape_and_cache_
from vllm.ops.latent_attention import latent_attention, write_latent_
from vllm.ops.packed_linear import PackedLinear, pack_linear, packed_linear
from vllm.ops.paged_attention import paged_attention

# From so many of a request's tokens in a step on, keys and values of heads are cheaper to attend to, although those of
# former tokens are made anew.
WIDENS_FROM = 256
# So much of keys and values is made for a request; with more, latents are attended to.
_MOST_BYTES = 256 * 2**20


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
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        heads: LatentHeads,
        kv_cache: tuple[Tensor, ...],
        attn: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Store this step's rows, then attend: [T or L, H * value_dim].

        Args:
            q: [T, H, nope_dim + rope_dim], rotated.
            latent, rope: [T, latent_dim] and [T, rope_dim], rotated.
            heads: what widens latents.
            rows: int64 [L], tokens whose result is returned; None = all.
        """
        if self.kv_group:
            attn = attn.groups[self.kv_group - 1]
        (cache,) = kv_cache
        cache_scale = self.options.k_scale
        write_latent_(latent, rope, cache, attn.slot_mapping, cache_scale)
        if attn.shared is not None:
            tokens, slots = attn.shared
            write_latent_(latent.index_select(0, tokens), rope.index_select(0, tokens), cache, slots, cache_scale)
        if rows is not None and not rows.shape[0]:
            return q.new_empty(0, q.shape[1] * heads.value_dim)
        requests = attn.block_table, attn.query_start_loc, attn.seq_lens
        if attn.max_query_len >= WIDENS_FROM and heads.widens(len(q)) and heads.value_dim <= q.shape[2]:
            out = self._attend_widened(q, heads, cache, *requests)
        else:
            out = self._attend_latents(q, heads, cache, *requests)
        return out if rows is None else out.index_select(0, rows)

    def _attend_latents(
        self,
        q: Tensor,
        heads: LatentHeads,
        cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        """Queries are taken to the latents' space, and the result from there to values."""
        q_nope, q_rope = q.tensor_split((heads.nope_dim,), dim=2)
        requests = block_table, query_start_loc, seq_lens
        scale = self.options.scale
        assert scale is not None
        latents = latent_attention(
            heads.queries_to_latent(q_nope), q_rope, cache, *requests, scale, self.options.k_scale
        )
        return heads.latent_to_values(latents)

    def _attend_widened(
        self,
        q: Tensor,
        heads: LatentHeads,
        cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
    ) -> Tensor:
        """Requests with many tokens get keys and values; others attend to latents."""
        starts, lens = query_start_loc.tolist(), seq_lens.tolist()
        counts = query_start_loc.diff()
        are_widened = [
            starts[r + 1] - starts[r] >= WIDENS_FROM and heads.widened_bytes(length) <= _MOST_BYTES
            for r, length in enumerate(lens)
        ]
        out = q.new_empty(len(q), q.shape[1] * heads.value_dim)
        for r, is_widened in enumerate(are_widened):
            if is_widened:
                tokens = slice(starts[r], starts[r + 1])
                out[tokens] = self._attend_request(q[tokens], heads, cache, block_table[r], lens[r])
        others = ~torch.tensor(are_widened)
        if others.any():
            taken = others.repeat_interleave(counts.long()).nonzero().flatten()
            own_starts = torch.cat([counts.new_zeros(1), counts[others].cumsum(0, dtype=torch.int32)])
            requests = block_table[others], own_starts, seq_lens[others]
            out[taken] = self._attend_latents(q.index_select(0, taken), heads, cache, *requests)
        return out

    def _attend_request(self, q: Tensor, heads: LatentHeads, cache: Tensor, blocks: Tensor, seq_len: int) -> Tensor:
        """[T, H * value_dim] of the queries [T, H, nope_dim + rope_dim], the last ones of `seq_len` tokens."""
        block_size, (num_heads, head_dim) = cache.shape[1], q.shape[1:]
        num_blocks = -(-seq_len // block_size)
        rows = cache[blocks[:num_blocks].long()].flatten(0, 1)[:seq_len]
        if rows.dtype != q.dtype:
            rows = (rows.float() * self.options.k_scale).to(q.dtype)
        latent, rope = rows.split((heads.latent_dim, rows.shape[1] - heads.latent_dim), dim=1)
        k_nope, values = heads.widen(latent.contiguous())
        keys = torch.cat((k_nope, rope[:, None].expand(-1, num_heads, -1)), dim=2)
        values = torch.nn.functional.pad(values, (0, head_dim - heads.value_dim))
        shape = kv_cache_shape(num_blocks, block_size, num_heads, head_dim)
        k_cache, v_cache = q.new_empty(shape), q.new_empty(shape)
        reshape_and_cache_(keys, values, k_cache, v_cache, torch.arange(seq_len))
        table = torch.arange(num_blocks, dtype=torch.int32)[None]
        starts = torch.tensor([0, len(q)], dtype=torch.int32)
        scale = self.options.scale
        assert scale is not None
        out = paged_attention(q, k_cache, v_cache, table, starts, torch.tensor([seq_len], dtype=torch.int32), scale)
        return out[:, :, : heads.value_dim].flatten(1)


class LatentHeads(ColumnParallelLinear):
    """The product that widens a latent to each head's keys [nope_dim] and values [value_dim], the checkpoint's
    `kv_b_proj`. Queries go through the keys' part to latents, and weighted latents through the values' part; on the
    CPU, it is also held as it is for latents of long prompts. So a quantised weight is de-quantised, as no layout
    multiplies by both of its dimensions."""

    needs_whole_weight = True
    # AdaptedHeads.
    adapters: Any

    def __init__(self, num_heads: int, nope_dim: int, value_dim: int, latent_dim: int) -> None:
        super().__init__(latent_dim, num_heads * (nope_dim + value_dim), False, "kv_b_proj")
        self._sizes = self.nope_dim, self.value_dim = nope_dim, value_dim
        self.latent_dim = latent_dim
        self._whole: PackedLinear | None = None
        self.keys: PackedHeads
        self.values: PackedHeads

    @cached_property
    def num_heads(self) -> int:
        """This rank's heads."""
        return len(self.parts["kv_b_proj"].held) // sum(self._sizes)

    def queries_to_latent(self, q: Tensor) -> Tensor:
        """[T, H, nope_dim] -> [T, H, latent_dim]."""
        out = head_linear(q, self.keys)
        return out if self.adapters is None else self.adapters.add_to_latents(out, q)

    def latent_to_values(self, latent: Tensor) -> Tensor:
        """[T, H, latent_dim] -> [T, H * value_dim]."""
        out = head_linear(latent, self.values)
        return (out if self.adapters is None else self.adapters.add_to_values(out, latent)).flatten(1)

    def widens(self, num_tokens: int) -> bool:
        """Whether latents can be widened in a step: not where all tokens of a request must take one way, or some go
        through adapters."""
        if self._whole is None or envs.batch_invariant():
            return False
        return self.adapters is None or not self.adapters.changes(num_tokens)

    def widen(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """[S, latent_dim] -> keys [S, H, nope_dim] and values [S, H, value_dim]."""
        assert self._whole is not None
        keys, values = packed_linear(latent, self._whole).unflatten(1, (self.num_heads, -1)).split(self._sizes, dim=2)
        return keys, values

    def widened_bytes(self, num_tokens: int) -> int:
        """The bytes of that many tokens' keys and values, and of their copies in a cache."""
        return 4 * num_tokens * self.num_heads * sum(self._sizes) * self._empty.element_size()

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        if self.holds_own_weight:
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
        if self.keys.packed:
            self._whole = pack_linear(weight, None)
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
