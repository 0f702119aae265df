"""What layers with recurrent states have in common: a convolution of their projections, numbers of heads, a norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata
from vllm.layers.sharding import Shard, WeightSlot
from vllm.layers.state import StateShape
from vllm.ops.gated_rms_norm import gated_rms_norm
from vllm.ops.short_conv import short_conv_


class Convolution(nn.Module):
    """A convolution by channel, of parts side by side whose checkpoint's weights are [taps, channels] each; its SiLU
    follows."""

    def __init__(self, parts: dict[str, Shard], taps: int, bias: bool) -> None:
        super().__init__()
        self._parts, self._taps = parts, Shard.whole(taps)
        self.channels = sum(len(part.held) for part in parts.values())
        self.weight = nn.Parameter(torch.empty(taps, self.channels), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.channels), requires_grad=False) if bias else None
        self.state_shape = StateShape((taps - 1, self.channels), torch.get_default_dtype())

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where each part's weight and bias go."""
        slots: dict[str, WeightSlot] = {}
        start = 0
        for name, part in self._parts.items():
            own = slice(start, start := start + len(part.held))
            slots[f"{name}.weight"] = WeightSlot(self.weight.data[:, own], (self._taps, part))
            if self.bias is not None:
                slots[f"{name}.bias"] = WeightSlot(self.bias.data[own], (part,))
        return slots

    def forward(self, x: Tensor, tail: Tensor, attn: AttentionMetadata) -> Tensor:
        """[T, channels], whose last inputs `tail` keeps, -> [T, channels]."""
        return short_conv_(x, self.weight, self.bias, tail, *step_rows(attn), True)


class Decays(nn.Module):
    """The checkpoint's A_log and dt_bias, and D, of the heads (or channels) that the rank holds."""

    def __init__(self, rates: tuple[Shard, ...], biases: Shard | None = None, skips: Shard | None = None) -> None:
        super().__init__()
        self._rates, self._biases, self._skips = rates, biases, skips
        self.rate = _floats(*rates)
        self.bias = None if biases is None else _floats(biases)
        self.skip = None if skips is None else _floats(skips)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where they go; `rate` is e^A_log."""
        slots = {"A_log": WeightSlot(self.rate.data, self._rates, prepare=lambda value: value.float().exp())}
        for name, value, shard in (("dt_bias", self.bias, self._biases), ("D", self.skip, self._skips)):
            if value is not None and shard is not None:
                slots[name] = WeightSlot(value.data, (shard,))
        return slots


class GatedNorm(nn.Module):
    """RMSNorm of groups of `width` values, with a gate. `rows`: which weights the rank holds, where each value has
    one of its own; None: all groups share theirs."""

    def __init__(
        self, width: int, eps: float, rows: Shard | None = None, sigmoid: bool = False, gate_first: bool = False
    ) -> None:
        super().__init__()
        self.width, self.eps, self.sigmoid, self.gate_first = width, eps, sigmoid, gate_first
        self._rows = Shard.whole(width) if rows is None else rows
        self.weight = nn.Parameter(torch.empty(len(self._rows.held)), requires_grad=False)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the weight goes."""
        return {"weight": WeightSlot(self.weight.data, (self._rows,))}

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[T, C] and its gate [T, C] -> [T, C]."""
        return gated_rms_norm(x, gate, self.weight, self.eps, self.width, self.sigmoid, self.gate_first)


def heads_of(shard: Shard, width: int) -> Shard:
    """Of values [heads * width] the heads."""
    return Shard(shard.size // width, range(shard.held.start // width, shard.held.stop // width))


def step_rows(attn: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """The last tensors that operations of states take."""
    assert attn.state_slots is not None
    return attn.state_slots, attn.query_start_loc, attn.seq_lens


def _floats(*shards: Shard) -> nn.Parameter:
    shape = [len(shard.held) for shard in shards]
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
