"""The selective scan of Mamba 1, as its MambaSpec says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear, StackedLinear
from vllm.layers.sharding import Shard
from vllm.layers.state import StateLayer, StateShape
from vllm.models.norms import make_norm
from vllm.models.states.modules import Convolution, Decays, HeadLinear, step_rows
from vllm.models.states.specs import MambaSpec
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.selective_scan import selective_scan_


class Mamba(StateLayer):
    """The state is the tail of the convolution's inputs, and some values of each channel."""

    def __init__(self, spec: MambaSpec, hidden_size: int) -> None:
        channels = Shard.even(spec.channels, get_tp_group())
        conv = Convolution({"x": channels}, spec.kernel_size, spec.conv_bias)
        super().__init__((conv.state_shape, StateShape((spec.state_dim, len(channels.held)), torch.float32)))
        self.conv = conv
        self.in_proj = StackedLinear(hidden_size, dict.fromkeys(("x_proj", "z_proj"), spec.channels), spec.bias)
        self.widths = [spec.step_rank, spec.state_dim, spec.state_dim]
        self.x_proj: LinearBase
        self.dt_proj: LinearBase
        self.has_heads = spec.heads > 1
        if self.has_heads:
            width = spec.channels // spec.heads
            self.x_proj = HeadLinear(spec.heads, width, sum(self.widths), "inputs_proj")
            self.dt_proj = HeadLinear(spec.heads, spec.step_rank, width, "dt_proj")
        else:
            self.x_proj = RowParallelLinear(spec.channels, sum(self.widths), False, "inputs_proj")
            self.dt_proj = ColumnParallelLinear(spec.step_rank, spec.channels, False, "dt_proj")
        self.norms: nn.ModuleList | None = None
        if spec.norm is not None:
            self.norms = nn.ModuleList(make_norm(spec.norm, width) for width in self.widths)
        self.decays = Decays((Shard.whole(spec.state_dim), channels), channels, channels)
        self.out_proj = RowParallelLinear(spec.channels, hidden_size, spec.bias, "out_proj")

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        tail, pool = self.state
        x, z = self.in_proj(hidden, norm).chunk(2, dim=1)
        x = self.conv(x, tail, attn)
        inputs = self._inputs(x)
        if self.norms is not None:
            inputs = [own(each) for own, each in zip(self.norms, inputs, strict=True)]
        steps, b, c = inputs
        decays = self.decays
        assert decays.skip is not None
        numbers = decays.rate, decays.bias, decays.skip
        out = selective_scan_(x, self.dt_proj(steps), b, c, z, *numbers, pool, *step_rows(attn))
        return self.out_proj(out if rows is None else out.index_select(0, rows))

    def _inputs(self, x: Tensor) -> list[Tensor]:
        """The source of steps, B and C, each of all heads: [T, heads * width]."""
        inputs = self.x_proj(x)
        if not self.has_heads:
            return list(inputs.split(self.widths, dim=1))
        return [part.flatten(1) for part in inputs.unflatten(1, (-1, sum(self.widths))).split(self.widths, dim=2)]
