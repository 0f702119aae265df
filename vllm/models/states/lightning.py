"""Linear attention with constant decays, as its LightningSpec says."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import get_inplace_act_fn
from vllm.layers.linear import ColumnParallelLinear, RowParallelLinear, StackedLinear
from vllm.layers.sharding import Shard
from vllm.layers.state import StateLayer, StateShape
from vllm.models.states.modules import GatedNorm, step_rows
from vllm.models.states.specs import LightningSpec
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.state_space_scan import state_space_scan_


class Lightning(StateLayer):
    """The state is a matrix of each head."""

    def __init__(self, spec: LightningSpec, hidden_size: int) -> None:
        heads = Shard.even(len(spec.rates), get_tp_group()).held
        super().__init__((StateShape((len(heads), spec.head_dim, spec.head_dim), torch.float32),))
        self.heads = len(heads)
        width = len(spec.rates) * spec.head_dim
        # As a state space of which each head has a group has them.
        self.qkv_proj = StackedLinear(hidden_size, dict.fromkeys(("v_proj", "k_proj", "q_proj"), width), False)
        self.gate_proj = ColumnParallelLinear(hidden_size, width, False, "gate_proj")
        self.act_fn = get_inplace_act_fn("silu")
        rates = torch.tensor([spec.rates[head] for head in heads], dtype=torch.float32)
        self.rate: Tensor
        self.zero: Tensor
        self.register_buffer("rate", rates, persistent=False)
        self.register_buffer("zero", torch.zeros_like(rates), persistent=False)
        self.norm = GatedNorm(width, spec.norm_eps, Shard.even(width, get_tp_group()), sigmoid=True)
        self.out_proj = RowParallelLinear(width, hidden_size, False, "out_proj")

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        (pool,) = self.state
        if norm is not None:
            hidden = norm(hidden)
        vkq = self.act_fn(self.qkv_proj(hidden))
        # Steps are all 1, whatever they would follow from.
        steps, limits = vkq[:, : self.heads], (1.0, 1.0)
        out = state_space_scan_(vkq, steps, self.rate, self.zero, None, pool, *step_rows(attn), self.heads, *limits)
        if rows is not None:
            out, hidden = out.index_select(0, rows), hidden.index_select(0, rows)
        return self.out_proj(self.norm(out, self.gate_proj(hidden)))
