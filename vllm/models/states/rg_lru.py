"""The recurrent block of Griffin, as its RgLruSpec says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import get_inplace_act_fn
from vllm.layers.linear import RowParallelLinear, StackedLinear
from vllm.layers.sharding import Shard, WeightSlot
from vllm.layers.state import StateLayer, StateShape
from vllm.models.states.modules import HeadLinear, step_rows
from vllm.models.states.specs import RgLruSpec
from vllm.ops.gated_recurrence import gated_recurrence_
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.short_conv import short_conv_


class RgLru(StateLayer):
    """The state is the tail of the convolution's inputs, and a number of each channel."""

    def __init__(self, spec: RgLruSpec, hidden_size: int) -> None:
        channels = Shard.even(spec.heads * spec.width, get_tp_group())
        count = len(channels.held)
        tail = StateShape((spec.kernel_size - 1, count), torch.get_default_dtype())
        super().__init__((tail, StateShape((count,), torch.float32)))
        self._channels, self._taps = channels, Shard.whole(spec.kernel_size)
        self.in_proj = StackedLinear(hidden_size, dict.fromkeys(("linear_x", "linear_y"), channels.size), True)
        self.act_fn = get_inplace_act_fn(spec.activation)
        self.conv_weight = nn.Parameter(torch.empty(spec.kernel_size, count), requires_grad=False)
        self.conv_bias = nn.Parameter(torch.empty(count), requires_grad=False)
        self.input_gate = HeadLinear(spec.heads, spec.width, spec.width, "input_gate")
        self.recurrent_gate = HeadLinear(spec.heads, spec.width, spec.width, "recurrent_gate")
        # Biases of both gates, then the rate.
        self.numbers = nn.Parameter(torch.empty(3, count, dtype=torch.float32), requires_grad=False)
        self.out_proj = RowParallelLinear(channels.size, hidden_size, True, "linear_out")

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the convolution's values go, and the numbers of channels."""
        of_channels = (self._channels,)
        values = self.numbers.data
        return {
            "conv.x.weight": WeightSlot(self.conv_weight.data, (self._taps, self._channels)),
            "conv.x.bias": WeightSlot(self.conv_bias.data, of_channels),
            "input_gate_bias": WeightSlot(values[0], of_channels),
            "recurrent_gate_bias": WeightSlot(values[1], of_channels),
            "recurrent_param": WeightSlot(values[2], of_channels, prepare=lambda value: 8 * F.softplus(value.float())),
        }

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        tail, pool = self.state
        x, y = self.in_proj(hidden, norm).chunk(2, dim=1)
        step = step_rows(attn)
        x = short_conv_(x, self.conv_weight, self.conv_bias, tail, *step)
        input_bias, kept_bias, rate = self.numbers.unbind()
        gates = self.input_gate(x), self.recurrent_gate(x)
        out = gated_recurrence_(x, *gates, input_bias, kept_bias, rate, pool, *step)
        if rows is not None:
            out, y = out.index_select(0, rows), y.index_select(0, rows)
        return self.out_proj(out * self.act_fn(y.contiguous()))
