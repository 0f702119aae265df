"""RWKV 4's two mixings, as WkvSpec and ChannelMixSpec say."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import get_inplace_act_fn
from vllm.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.layers.sharding import Shard, WeightSlot
from vllm.layers.state import StateLayer, StateShape
from vllm.models.states.modules import step_rows
from vllm.models.states.specs import ChannelMixSpec, WkvSpec
from vllm.ops.elementwise import gated
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.short_conv import short_conv_
from vllm.ops.wkv import wkv_


class _Shift(nn.Module):
    """Several mixtures of a token's input and the one before, each with shares by channel: a convolution of two
    taps."""

    def __init__(self, size: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self._names, self._size = names, size
        self.taps = nn.Parameter(torch.empty(len(names), 2, size), requires_grad=False)
        self.state_shape = StateShape((1, len(names) * size), torch.get_default_dtype())

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the shares of the token itself, and of the one before, go."""
        slots = {}
        for name, (rest, own) in zip(self._names, self.taps.data, strict=True):
            slots[f"time_mix_{name}"] = WeightSlot(own, (Shard.whole(self._size),))
            slots[f"time_rest_{name}"] = WeightSlot(rest, (Shard.whole(self._size),))
        return slots

    def forward(self, x: Tensor, tail: Tensor, attn: AttentionMetadata) -> tuple[Tensor, ...]:
        """[T, H] -> each mixture, [T, H]."""
        step = step_rows(attn)
        tails = tail.split(self._size, dim=2)
        return tuple(short_conv_(x, taps, None, own, *step) for taps, own in zip(self.taps, tails, strict=True))


class TimeMix(StateLayer):
    """The state is the last input, once for each mixture, and three numbers of each channel."""

    def __init__(self, spec: WkvSpec, hidden_size: int) -> None:
        shift = _Shift(hidden_size, ("key", "value", "receptance"))
        channels = Shard.even(spec.channels, get_tp_group())
        super().__init__((shift.state_shape, StateShape((3, len(channels.held)), torch.float32)))
        self.shift, self._channels = shift, channels
        self.key, self.value, self.receptance = (
            ColumnParallelLinear(hidden_size, spec.channels, False, name) for name in ("key", "value", "receptance")
        )
        # The decay's rate, and the bonus of a token's own key.
        self.numbers = nn.Parameter(torch.empty(2, len(channels.held), dtype=torch.float32), requires_grad=False)
        self.output = RowParallelLinear(spec.channels, hidden_size, False, "output")

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the numbers of channels go."""
        rate, bonus = self.numbers.data
        return {
            "time_decay": WeightSlot(rate, (self._channels,), prepare=lambda value: value.float().exp()),
            "time_first": WeightSlot(bonus, (self._channels,)),
        }

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        tail, pool = self.state
        key, value, gate = self.shift(hidden if norm is None else norm(hidden), tail, attn)
        rate, bonus = self.numbers.unbind()
        projected = self.key(key), self.value(value), self.receptance(gate)
        out = wkv_(*projected, rate, bonus, pool, *step_rows(attn))
        return self.output(out if rows is None else out.index_select(0, rows))


class ChannelMix(StateLayer):
    """The state is the last input, once for each mixture."""

    def __init__(self, spec: ChannelMixSpec, hidden_size: int) -> None:
        shift = _Shift(hidden_size, ("key", "receptance"))
        super().__init__((shift.state_shape,))
        self.shift = shift
        self.key = ColumnParallelLinear(hidden_size, spec.intermediate_size, False, "key")
        self.act_fn = get_inplace_act_fn("relu2")
        self.value = RowParallelLinear(spec.intermediate_size, hidden_size, False, "value")
        self.receptance = ReplicatedLinear(hidden_size, hidden_size, False, "receptance")

    def mix(self, hidden: Tensor, attn: AttentionMetadata, rows: Tensor | None, norm: AddedNorm | None) -> Tensor:
        (tail,) = self.state
        key, gate = self.shift(hidden if norm is None else norm(hidden), tail, attn)
        if rows is not None:
            key, gate = key.index_select(0, rows), gate.index_select(0, rows)
        return gated(self.value(self.act_fn(self.key(key))), self.receptance(gate))
