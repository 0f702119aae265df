"""The matrix memory of xLSTM, as its MlstmSpec says."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.layernorm import LayerNorm
from vllm.layers.linear import ColumnParallelLinear, RowParallelLinear, StackedLinear
from vllm.layers.sharding import Shard
from vllm.layers.state import StateLayer, StateShape
from vllm.models.states.modules import step_rows
from vllm.models.states.specs import MlstmSpec
from vllm.ops.elementwise import gated
from vllm.ops.mlstm import mlstm_
from vllm.ops.rms_norm import AddedNorm


class Mlstm(StateLayer):
    """The state of each head is a matrix, a sum of keys, and the logarithm of what both are divided by."""

    def __init__(self, spec: MlstmSpec, hidden_size: int) -> None:
        heads = Shard.even(spec.heads, get_tp_group())
        size = spec.key_dim * spec.value_dim + spec.key_dim + 1
        super().__init__((StateShape((len(heads.held), size), torch.float32),))
        self.spec, keys, values = spec, spec.heads * spec.key_dim, spec.heads * spec.value_dim
        self.qkv_proj = StackedLinear(hidden_size, {"q_proj": keys, "k_proj": keys, "v_proj": values}, False)
        self.gates_proj = StackedLinear(hidden_size, dict.fromkeys(("i_proj", "f_proj"), spec.heads), True)
        self.gate_proj = ColumnParallelLinear(hidden_size, values, False, "gate_proj")
        self.norm = LayerNorm(spec.value_dim, spec.norm_eps, heads=heads)
        self.out_proj = RowParallelLinear(values, hidden_size, False, "out_proj")

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        (pool,) = self.state
        if norm is not None:
            hidden = norm(hidden)
        spec = self.spec
        inputs = self.qkv_proj(hidden), self.gates_proj(hidden)
        out = mlstm_(*inputs, pool, *step_rows(attn), spec.key_dim, spec.cap, spec.eps)
        if rows is not None:
            out, hidden = out.index_select(0, rows), hidden.index_select(0, rows)
        normed = self.norm(out.unflatten(1, (-1, spec.value_dim))).flatten(1)
        return self.out_proj(gated(normed, self.gate_proj(hidden)))
