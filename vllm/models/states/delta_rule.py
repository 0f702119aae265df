"""Linear attention by the gated delta rule, as its DeltaRuleSpec says."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear import RowParallelLinear, StackedLinear
from vllm.layers.sharding import Shard
from vllm.layers.state import StateLayer, StateShape
from vllm.models.states.modules import Convolution, Decays, GatedNorm, step_rows
from vllm.models.states.specs import DeltaRuleSpec
from vllm.ops.gated_delta_rule import gated_delta_rule_
from vllm.ops.rms_norm import AddedNorm


class DeltaRule(StateLayer):
    """The state is the tail of the convolution's inputs, and a matrix of each head."""

    def __init__(self, spec: DeltaRuleSpec, hidden_size: int) -> None:
        group = get_tp_group()
        keys, values = spec.key_heads * spec.key_dim, spec.heads * spec.value_dim
        convolved = {"q": Shard.even(keys, group), "k": Shard.even(keys, group), "v": Shard.even(values, group)}
        conv = Convolution(convolved, spec.kernel_size, False)
        heads = Shard.even(spec.heads, group)
        matrix = StateShape((len(heads.held), spec.key_dim, spec.value_dim), torch.float32)
        super().__init__((conv.state_shape, matrix))
        self.conv, self.key_heads, self.beta_scale = conv, spec.key_heads // group.world_size, spec.beta_scale
        sizes = {"q_proj": keys, "k_proj": keys, "v_proj": values, "z_proj": values}
        self.in_proj = StackedLinear(hidden_size, sizes | {"b_proj": spec.heads, "a_proj": spec.heads}, False)
        self.widths = [conv.channels, len(convolved["v"].held), len(heads.held), len(heads.held)]
        self.decays = Decays((heads,), heads)
        self.norm = GatedNorm(spec.value_dim, spec.norm_eps)
        self.out_proj = RowParallelLinear(values, hidden_size, False, "out_proj")

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        tail, pool = self.state
        qkv, z, b, a = self.in_proj(hidden, norm).split(self.widths, dim=1)
        qkv = self.conv(qkv, tail, attn)
        assert self.decays.bias is not None
        decays = self.decays.rate, self.decays.bias
        out = gated_delta_rule_(qkv, a, b, *decays, pool, *step_rows(attn), self.key_heads, self.beta_scale)
        if rows is not None:
            out, z = out.index_select(0, rows), z.index_select(0, rows)
        return self.out_proj(self.norm(out, z))
