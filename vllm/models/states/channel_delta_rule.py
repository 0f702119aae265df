"""Linear attention by the delta rule of which each channel decays by itself, as its ChannelDeltaSpec says."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.layers.sharding import Shard
from vllm.layers.state import StateLayer, StateShape
from vllm.models.states.modules import Convolution, Decays, GatedNorm, step_rows
from vllm.models.states.specs import ChannelDeltaSpec
from vllm.ops.gated_delta_rule import gated_delta_rule_
from vllm.ops.rms_norm import AddedNorm


class ChannelDeltaRule(StateLayer):
    """The state is the tail of the convolution's inputs, and a matrix of each head."""

    def __init__(self, spec: ChannelDeltaSpec, hidden_size: int) -> None:
        group = get_tp_group()
        width, inner = spec.heads * spec.head_dim, Shard.whole(spec.head_dim)
        channels, heads = Shard.even(width, group), Shard.even(spec.heads, group)
        conv = Convolution(dict.fromkeys("qkv", channels), spec.kernel_size, False)
        matrix = StateShape((len(heads.held), spec.head_dim, spec.head_dim), torch.float32)
        super().__init__((conv.state_shape, matrix))
        self.conv, self.heads = conv, len(heads.held)
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), channels)
        between = inner if spec.low_rank else channels
        parts |= {"b_proj": heads, "f_a_proj": between, "g_a_proj": between}
        self.in_proj = LinearBase(Shard.whole(hidden_size), parts, False)
        self.widths = [conv.channels, self.heads, len(between.held), len(between.held)]
        self.f_b_proj: ColumnParallelLinear | None = None
        self.g_b_proj: ColumnParallelLinear | None = None
        if spec.low_rank:
            self.f_b_proj = ColumnParallelLinear(spec.head_dim, width, False, "f_b_proj")
            self.g_b_proj = ColumnParallelLinear(spec.head_dim, width, False, "g_b_proj")
        self.bound = spec.bound
        self.decays = Decays((heads,), channels)
        self.norm = GatedNorm(spec.head_dim, spec.norm_eps, sigmoid=True)
        self.out_proj = RowParallelLinear(width, hidden_size, False, "out_proj")

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        tail, pool = self.state
        qkv, b, f, g = self.in_proj(hidden, norm).split(self.widths, dim=1)
        qkv = self.conv(qkv, tail, attn)
        if self.f_b_proj is not None:
            f = self.f_b_proj(f)
        assert self.decays.bias is not None
        numbers = f, b, self.decays.rate, self.decays.bias
        out = gated_delta_rule_(qkv, *numbers, pool, *step_rows(attn), self.heads, bound=self.bound)
        if rows is not None:
            out, g = out.index_select(0, rows), g.index_select(0, rows)
        if self.g_b_proj is not None:
            g = self.g_b_proj(g)
        return self.out_proj(self.norm(out, g))
