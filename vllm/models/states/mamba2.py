"""The state space of Mamba 2, as its Mamba2Spec says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.communicator import Communicator
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear import LinearBase, RowParallelLinear
from vllm.layers.sharding import Shard
from vllm.layers.state import StateLayer, StateShape
from vllm.models.states.modules import Convolution, Decays, GatedNorm, step_rows
from vllm.models.states.specs import Mamba2Spec
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.state_space_scan import state_space_scan_


class Mamba2(StateLayer):
    """The state is the tail of the convolution's inputs, and a matrix of each head."""

    def __init__(self, spec: Mamba2Spec, hidden_size: int) -> None:
        group = get_tp_group()
        inner = Shard.even(spec.heads * spec.head_dim, group)
        shared = _groups_of(spec.groups, spec.state_dim, group)
        heads = Shard.even(spec.heads, group)
        conv = Convolution({"x": inner, "b": shared, "c": shared}, spec.kernel_size, spec.conv_bias)
        matrix = StateShape((len(heads.held), spec.state_dim, spec.head_dim), torch.float32)
        super().__init__((conv.state_shape, matrix))
        self.conv, self.groups, self.dt_limits = conv, len(shared.held) // spec.state_dim, spec.dt_limits
        parts = {"z_proj": inner, "x_proj": inner, "b_proj": shared, "c_proj": shared, "dt_proj": heads}
        self.in_proj = LinearBase(Shard.whole(hidden_size), parts, spec.in_bias)
        self.widths = [len(inner.held), conv.channels, len(heads.held)]
        self.decays = Decays((heads,), heads, heads)
        self.norm: GatedNorm | None = None
        if spec.norm_groups:
            self.norm = GatedNorm(inner.size // spec.norm_groups, spec.norm_eps, inner, gate_first=spec.gate_first)
        self.out_proj = RowParallelLinear(inner.size, hidden_size, spec.out_bias, "out_proj")

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        tail, pool = self.state
        z, xbc, dt = self.in_proj(hidden, norm).split(self.widths, dim=1)
        xbc = self.conv(xbc, tail, attn)
        decays = self.decays
        assert decays.bias is not None
        numbers = decays.rate, decays.bias, decays.skip
        out = state_space_scan_(xbc, dt, *numbers, pool, *step_rows(attn), self.groups, *self.dt_limits)
        if rows is not None:
            out, z = out.index_select(0, rows), z.index_select(0, rows)
        return self.out_proj(
            (out.float() * F.silu(z.float())).to(out.dtype) if self.norm is None else self.norm(out, z)
        )


def _groups_of(groups: int, width: int, group: Communicator) -> Shard:
    """The rank's groups of B or C, or its one where there are more ranks."""
    ranks = group.world_size
    if groups % ranks == 0:
        return Shard.even(groups * width, group)
    if ranks % groups:
        raise ValueError(f"tensor_parallel_size={ranks} does not fit a layer's {groups} groups")
    first = group.rank * groups // ranks * width
    return Shard(groups * width, range(first, first + width))
