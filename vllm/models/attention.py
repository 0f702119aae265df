"""Attention of a decoder's layer, as its AttentionSpec says."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.attention import Attention, AttentionOptions
from vllm.layers.layernorm import HeadLayerNorms, ShardedRMSNorm
from vllm.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, separate_pair_columns
from vllm.layers.rotary_embedding import RotaryEmbedding
from vllm.layers.sharding import Shard, WeightSlot
from vllm.models.norms import Norm, make_norm
from vllm.models.spec import AttentionSpec, RotarySpec
from vllm.ops.elementwise import gated
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.rotary import rotary_embedding_


class RotaryTables:
    """The rotary embeddings of a model: layers with equal options share one table."""

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions
        self._made: list[tuple[RotarySpec, RotaryEmbedding]] = []

    def get(self, spec: RotarySpec) -> RotaryEmbedding:
        """The table of `spec`."""
        for other, rotary in self._made:
            if other == spec:
                return rotary
        rotary = RotaryEmbedding(spec.dim, self._max_positions, spec.rope)
        self._made.append((spec, rotary))
        return rotary


class DecoderAttention(nn.Module):
    """Self-attention."""

    def __init__(
        self, spec: AttentionSpec, hidden_size: int, tables: RotaryTables, input_size: int | None = None
    ) -> None:
        """`input_size`: of what is projected to queries, keys and values, where it is not `hidden_size`."""
        super().__init__()
        self.head_dim = spec.head_dim
        self.clip, self.clips_heads, self.query_growth = spec.clip, spec.clip_after_norm, spec.query_growth
        self.growth_start = spec.growth_start
        self.rotates_first = spec.qk_norm_after_rotary or spec.query_growth is not None
        interleaved = spec.rotary.dim if spec.rotary is not None and spec.rotary.interleaved else 0
        self.value_is_key = spec.value_is_key
        names = ["q_proj", "k_proj", "v_proj"] if spec.kv_source is None else ["q_proj"]
        if spec.value_is_key and spec.kv_source is None:
            names.remove("v_proj")
        heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
        self.qkv_proj = QKVParallelLinear(input_size or hidden_size, *heads, spec.qkv_bias, interleaved, names)
        width = spec.num_heads * spec.head_dim
        self.o_proj = RowParallelLinear(width, hidden_size, spec.o_bias, "o_proj")
        self.gate_proj: ColumnParallelLinear | None = None
        self.has_softplus_gate = spec.output_gate == "softplus"
        if spec.output_gate is not None:
            gates = spec.num_heads if spec.gate_per_head else width
            self.gate_proj = ColumnParallelLinear(hidden_size, gates, False, "gate_proj")
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if spec.qk_norm is not None:
            self.q_norm = self._qk_norm(spec, spec.num_heads)
            self.k_norm = self._qk_norm(spec, spec.num_kv_heads) if spec.kv_source is None else None
        self.v_norm: nn.Module | None = None
        if spec.v_norm is not None and spec.kv_source is None:
            self.v_norm = make_norm(spec.v_norm, spec.head_dim)
        self.sub_norm: nn.Module | None = None
        if spec.output_norm is not None:
            self.sub_norm = ShardedRMSNorm(Shard.even(width, get_tp_group()), spec.output_norm.eps, get_tp_group(), 1)
        self.rotary = None if spec.rotary is None else tables.get(spec.rotary)
        held = self.qkv_proj.parts["q_proj"].held
        self._heads = Shard(spec.num_heads, range(held.start // spec.head_dim, held.stop // spec.head_dim))
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            sinks = torch.empty(len(self._heads.held), dtype=torch.float32)
            self.sinks = nn.Parameter(sinks, requires_grad=False)
        self.attn = Attention(
            spec.head_dim,
            rotary=None if self.rotates_first else self.rotary,
            options=self._options(spec),
            num_kv_heads=None if spec.kv_source is not None else self.qkv_proj.head_counts[1],
            kv_sharing_target=spec.kv_source,
        )

    def _options(self, spec: AttentionSpec) -> AttentionOptions:
        slopes = None
        if spec.alibi_slopes is not None:
            slopes = torch.tensor([spec.alibi_slopes[head] for head in self._heads.held], dtype=torch.float32)
        return AttentionOptions(spec.scale, spec.window, spec.softcap, slopes, self.sinks, spec.chunk)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's sinks go."""
        return {} if self.sinks is None else {"sinks": WeightSlot(self.sinks.data, (self._heads,))}

    def _qk_norm(self, spec: AttentionSpec, num_heads: int) -> nn.Module:
        assert spec.qk_norm is not None
        if spec.qk_norm_over == "head":
            return self._prepared(make_norm(spec.qk_norm, spec.head_dim), spec)
        held = self.qkv_proj.parts["q_proj" if num_heads == spec.num_heads else "k_proj"]
        if spec.qk_norm_over in ("heads", "norms"):
            first, end = held.held.start // spec.head_dim, held.held.stop // spec.head_dim
            heads = Shard(num_heads, range(first, end))
            if spec.qk_norm_over == "norms":
                return HeadLayerNorms(spec.head_dim, spec.qk_norm.eps, heads)
            return self._prepared(make_norm(spec.qk_norm, spec.head_dim, heads), spec)
        group = get_tp_group()
        return ShardedRMSNorm(held, spec.qk_norm.eps, group, len(held.held) * group.world_size // held.size)

    @staticmethod
    def _prepared(norm: Norm, spec: AttentionSpec) -> Norm:
        """With its values in the order of the heads' rows, which QKVParallelLinear changes."""
        if spec.rotary is not None and spec.rotary.interleaved:
            norm.prepare = partial(separate_pair_columns, num_rotated=spec.rotary.dim)
        return norm

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
        norm: AddedNorm | None,
    ) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H], or [L, H] for the tokens in `rows`."""
        if self.gate_proj is not None and norm is not None:
            hidden, norm = norm(hidden), None
        qkv = self.qkv_proj(hidden, norm)
        if self.clip is not None and not self.clips_heads:
            qkv = qkv.clamp(-self.clip, self.clip)
        q, k, v = self._heads_of(qkv, positions)
        out = self.attn(q, k, v, kv_cache, attn, rows, positions)
        if self.gate_proj is not None:
            gate = self.gate_proj(hidden if rows is None else hidden.index_select(0, rows))
            out = gated(out, gate, self.has_softplus_gate)
        return self.o_proj(out if self.sub_norm is None else self.sub_norm(out))

    def _heads_of(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The heads of the projections [T, width], each [T, heads, D], as attention takes them."""
        parts = qkv.view(qkv.shape[0], -1, self.head_dim).split(self.qkv_proj.head_counts, dim=1)
        q, k, v = (*parts, None, None)[:3]
        if self.value_is_key:
            v = k
        if self.rotates_first and self.rotary is not None:
            assert k is not None
            rotary_embedding_(positions, q, k, self.rotary.cos_sin_cache)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if self.clip is not None and self.clips_heads:
            q, k, v = (None if heads is None else heads.clamp(-self.clip, self.clip) for heads in (q, k, v))
        if self.query_growth is not None:
            beta, length = self.query_growth
            lengths = (positions + self.growth_start).div(length, rounding_mode="floor")
            q = q * (1 + beta * torch.log1p(lengths))[:, None, None].to(q.dtype)
        return q, k, v
