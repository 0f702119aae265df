"""Attention of a decoder's layer, as its LatentAttentionSpec says."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.latent_attention import LatentAttention, LatentHeads
from vllm.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.layers.sharding import Shard, WeightSlot
from vllm.models.attention import RotaryTables
from vllm.models.norms import make_norm
from vllm.models.spec import LatentAttentionSpec
from vllm.ops.elementwise import gated, scaled
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.rotary import rotary_embedding_


def _separate_last_pairs(rows: Tensor, head_dim: int, num_rotated: int) -> Tensor:
    """[heads * head_dim, ...] with the last num_rotated rows of each head in the order 0, 2, 4 ... 1, 3, 5 ..."""
    order = torch.arange(head_dim)
    order[-num_rotated:] = order[-num_rotated:].view(-1, 2).t().flatten()
    return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


class _LatentLinear(LinearBase):
    """The projections of hidden states as one product, outputs side by side: of queries (`q_proj`, of this rank's
    heads) or of what they are made of (`q_a_proj`), and of the cache's rows."""

    def __init__(self, hidden_size: int, spec: LatentAttentionSpec) -> None:
        queries = {"q_proj": Shard.even(spec.num_heads * spec.head_dim, get_tp_group())}
        if spec.query_dim is not None:
            queries = {"q_a_proj": Shard.whole(spec.query_dim)}
        rows = Shard.whole(spec.latent_dim + spec.rope_dim)
        super().__init__(Shard.whole(hidden_size), queries | {"kv_a_proj_with_mqa": rows}, spec.bias)
        self._spec = spec
        if spec.bias and spec.query_dim is None:
            assert self.bias is not None
            self.bias.data[: len(queries["q_proj"].held)] = 0

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots = super().checkpoint_slots()
        slots.pop("q_proj.bias", None)
        slots = _rotated_apart(self, slots, self._spec, "q_proj", self._spec.nope_dim)
        return _rotated_apart(self, slots, self._spec, "kv_a_proj_with_mqa", self._spec.latent_dim)


class _QueryHeads(ColumnParallelLinear):
    """Queries from what they are made of."""

    def __init__(self, spec: LatentAttentionSpec) -> None:
        assert spec.query_dim is not None
        super().__init__(spec.query_dim, spec.num_heads * spec.head_dim, False, "q_b_proj")
        self._spec = spec

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        return _rotated_apart(self, super().checkpoint_slots(), self._spec, "q_b_proj", self._spec.nope_dim)


def _rotated_apart(
    linear: LinearBase, slots: dict[str, WeightSlot], spec: LatentAttentionSpec, part: str, first: int
) -> dict[str, WeightSlot]:
    """`slots`, of which those of `part` put pairs that rotate together, from row `first` of each head on, half of them
    apart."""
    if spec.rotary is None or not spec.rotary.interleaved:
        return slots

    def prepare(rows: Tensor) -> Tensor:
        return _separate_last_pairs(rows, first + spec.rope_dim, spec.rope_dim)

    turned = {name: replace(slot, prepare=prepare) for name, slot in slots.items() if name.split(".")[0] == part}
    for name, slot in turned.items():
        if slot.shards[0].size != linear.parts[part].size:
            raise ValueError(f"{linear.prefix}: {name} must have a row for each output, whose order changes here")
    return slots | turned


class DecoderLatentAttention(nn.Module):
    """Self-attention over latents, of which the cache holds one a token: see LatentAttention."""

    def __init__(self, spec: LatentAttentionSpec, hidden_size: int, tables: RotaryTables) -> None:
        super().__init__()
        self.spec = spec
        self.qkv_a_proj = _LatentLinear(hidden_size, spec)
        self.q_a_layernorm: nn.Module | None = None
        self.q_b_proj: _QueryHeads | None = None
        if spec.query_dim is not None:
            self.q_a_layernorm = make_norm(spec.norm, spec.query_dim)
            self.q_b_proj = _QueryHeads(spec)
        self.kv_a_layernorm = make_norm(spec.norm, spec.latent_dim)
        self.kv_b_proj = LatentHeads(spec.num_heads, spec.nope_dim, spec.value_dim, spec.latent_dim)
        self.o_proj = RowParallelLinear(spec.num_heads * spec.value_dim, hidden_size, spec.bias, "o_proj")
        self.gate_proj: ColumnParallelLinear | None = None
        if spec.output_gate:
            self.gate_proj = ColumnParallelLinear(hidden_size, spec.num_heads, False, "gate_proj")
        self.rotary = None if spec.rotary is None else tables.get(spec.rotary)
        self.attn = LatentAttention(spec.latent_dim + spec.rope_dim, spec.scale)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        kv_cache: tuple[Tensor, ...],
        attn: AttentionMetadata,
        rows: Tensor | None,
        norm: AddedNorm | None,
    ) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H], or [L, H] for the tokens in `rows`."""
        spec = self.spec
        if self.gate_proj is not None and norm is not None:
            hidden, norm = norm(hidden), None
        q, row = self.qkv_a_proj(hidden, norm).tensor_split((-spec.latent_dim - spec.rope_dim,), dim=1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        if spec.query_scale != 1.0:
            q = scaled(q, spec.query_scale)
        q = q.unflatten(1, (-1, spec.head_dim))
        if spec.query_growth is not None:
            beta, length = spec.query_growth
            q = q * (1 + beta * torch.log1p(positions.div(length, rounding_mode="floor")))[:, None, None].to(q.dtype)
        q_rope = q[:, :, spec.nope_dim :]
        latent, rope = row.split((spec.latent_dim, spec.rope_dim), dim=1)
        if self.rotary is not None:
            rotary_embedding_(positions, q_rope, rope[:, None], self.rotary.cos_sin_cache)
        latent = self.kv_a_layernorm(latent)
        if spec.latent_scale != 1.0:
            latent = scaled(latent, spec.latent_scale)
        out = self.attn(q, latent, rope, self.kv_b_proj, kv_cache, attn, rows)
        if self.gate_proj is not None:
            out = gated(out, self.gate_proj(hidden if rows is None else hidden.index_select(0, rows)))
        return self.o_proj(out)
