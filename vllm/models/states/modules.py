"""Parts that layers with recurrent states share: a convolution of their projections, numbers of heads, a norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.layernorm import AdaptableNorm
from vllm.layers.linear import UNQUANTIZED, ColumnParallelLinear
from vllm.layers.linear_method import LinearMethod
from vllm.layers.sharding import Shard, WeightSlot
from vllm.layers.state import StateShape
from vllm.ops.gated_rms_norm import gated_rms_norm
from vllm.ops.head_linear import PackedHeads, head_linear, pack_heads
from vllm.ops.rms_norm import AddedNorm
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


class GatedNorm(AdaptableNorm):
    """RMSNorm of groups of `width` values, with a gate. `rows`: which weights the rank holds, where each value has
    one of its own; None: all groups share theirs. A group may be shared by several ranks."""

    def __init__(
        self, width: int, eps: float, rows: Shard | None = None, sigmoid: bool = False, gate_first: bool = False
    ) -> None:
        super().__init__()
        self.width, self.eps, self.sigmoid, self.gate_first = width, eps, sigmoid, gate_first
        self._rows = Shard.whole(width) if rows is None else rows
        self.weight = nn.Parameter(torch.empty(len(self._rows.held)), requires_grad=False)
        self.bias = None
        self._group, held = get_tp_group(), len(self._rows.held)
        if held % width and width % held:
            raise ValueError(f"the ranks' {held} values do not fit a norm's groups of {width}")

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the weight goes."""
        assert self.weight is not None
        return {"weight": WeightSlot(self.weight.data, (self._rows,))}

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[T, C] and its gate [T, C] -> [T, C]."""
        return self.adapted(self._normalise, x, gate)

    def _normalise(self, x: Tensor, gate: Tensor, weight: Tensor, bias: None) -> Tensor:
        if len(self._rows.held) < self.width:
            return self._of_part(x, gate, weight)
        return gated_rms_norm(x, gate, weight, self.eps, self.width, self.sigmoid, self.gate_first)

    def _of_part(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """`forward` where a group's squares are summed over ranks."""
        factor = gate.float().sigmoid() if self.sigmoid else F.silu(gate.float())
        wide = x.float() * factor if self.gate_first else x.float()
        squares = wide.new_zeros(len(x), self._rows.size // self.width)
        own = self._rows.held.start // self.width
        squares[:, own] = wide.square().sum(1)
        scale = torch.rsqrt(self._group.all_reduce(squares)[:, own, None] / self.width + self.eps)
        normed = wide * scale * weight.float()
        return (normed if self.gate_first else normed * factor).to(x.dtype)


class HeadLinear(ColumnParallelLinear):
    """A product of each head's values with a matrix of its own, [T, H * inputs] -> [T, H * outputs]; heads are split
    over the ranks."""

    takes_adapters = False
    needs_whole_weight = True
    packed_heads: PackedHeads

    def __init__(self, heads: int, inputs: int, outputs: int, name: str) -> None:
        super().__init__(inputs, heads * outputs, False, name)
        self.width, self.height = inputs, outputs

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        return head_linear(x.unflatten(1, (-1, self.width)), self.packed_heads).flatten(1)

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        """Pack the loaded weight by head, whatever the method."""
        assert self.weight is not None
        weight = self.weight.data
        for quantized in self._quantized.values():
            weight = quantized.dequantize().to(self._empty)
        self._quantized.clear()
        self.packed_heads = pack_heads(weight.unflatten(0, (-1, self.height)))
        self.weight = None

    def begin_update(self) -> bool:
        """See LinearBase."""
        self.weight = nn.Parameter(self._empty.new_empty(self._shape), requires_grad=False)
        return True

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def keeps_values(self) -> bool:
        return False


def step_rows(attn: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """The last tensors that operations of states take."""
    assert attn.state_slots is not None
    return attn.state_slots, attn.query_start_loc, attn.seq_lens


def _floats(*shards: Shard) -> nn.Parameter:
    shape = [len(shard.held) for shard in shards]
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
