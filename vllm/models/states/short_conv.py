"""A gated short convolution, as its ShortConvSpec says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear import RowParallelLinear, StackedLinear
from vllm.layers.sharding import Shard, WeightSlot
from vllm.layers.state import StateLayer, StateShape
from vllm.models.states.specs import ShortConvSpec
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.short_conv import gated_short_conv_


class ShortConv(StateLayer):
    """The state is the tail of the convolution's inputs."""

    def __init__(self, spec: ShortConvSpec, hidden_size: int) -> None:
        channels = Shard.even(spec.size, get_tp_group())
        num_held = len(channels.held)
        super().__init__((StateShape((spec.kernel_size - 1, num_held), torch.get_default_dtype()),))
        self.in_proj = StackedLinear(hidden_size, dict.fromkeys(("b_proj", "c_proj", "x_proj"), spec.size), spec.bias)
        self.out_proj = RowParallelLinear(spec.size, hidden_size, spec.bias, "out_proj")
        self.conv_weight = nn.Parameter(torch.empty(spec.kernel_size, num_held), requires_grad=False)
        self.conv_bias = nn.Parameter(torch.empty(num_held), requires_grad=False) if spec.bias else None
        self._channels, self._taps = channels, Shard.whole(spec.kernel_size)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the convolution's values go."""
        slots = {"conv.weight": WeightSlot(self.conv_weight.data, (self._taps, self._channels))}
        if self.conv_bias is not None:
            slots["conv.bias"] = WeightSlot(self.conv_bias.data, (self._channels,))
        return slots

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        (tail,) = self.state
        assert attn.state_slots is not None
        step = attn.state_slots, attn.query_start_loc, attn.seq_lens
        out = gated_short_conv_(self.in_proj(hidden, norm), self.conv_weight, self.conv_bias, tail, *step)
        return self.out_proj(out if rows is None else out.index_select(0, rows))
