"""The experts of a mixture. Each is packed as soon as all of its tensors have been read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.linear_method import PARTS, QUANTIZED, UNQUANTIZED, LinearMethod, keeps_quantized, pack_expert
from vllm.layers.sharding import Shard, WeightSlot
from vllm.ops.experts import ExpertActivation, PackedExperts, experts, takes_all_experts
from vllm.ops.packed_linear import PackedLinear, unpack_linear
from vllm.quantization.weight import QuantizedStack, QuantizedWeight
from vllm.utils.host_memory import return_freed_memory
from vllm.utils.loading_threads import hand_over

_FIRST = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class ExpertSlot(WeightSlot):
    """The place of one expert's tensor.

    Attributes:
        take: takes the whole tensor; None: another rank has the expert.
    """

    take: Callable[[Tensor | QuantizedWeight], None] | None = None

    def fill(self, value: Tensor | QuantizedWeight | QuantizedStack) -> None:
        """Hand the tensor over. ValueError: it is a stack."""
        if isinstance(value, QuantizedStack):
            super().fill(value)
        elif self.take is not None:
            self.take(value)


@dataclass
class _Read:
    """The parts of an expert's weight that have been read, by name."""

    weights: dict[str, Tensor | QuantizedWeight] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)


def _of_alternating(activation: Callable[[Tensor], Tensor], inner: Tensor) -> Tensor:
    return activation(torch.cat((inner[:, ::2], inner[:, 1::2]), dim=-1))


class Experts(nn.Module):
    """E MLPs, of which each token takes some: the sum of their results by weight. A rank of a tensor-parallel
    group holds an equal part of them, and its result is a part of the sum. With `alternates` the first products'
    outputs are a gate, then what it is multiplied with, in turn, and gate_proj and up_proj are their halves. Where
    they are not `gated` there is up_proj alone.

    Raises:
        ValueError: the ranks cannot share them equally.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        size: int,
        activation: ExpertActivation | Callable[[Tensor], Tensor],
        bias: bool = False,
        weighs_inputs: bool = False,
        alternates: bool = False,
        gated: bool = True,
    ) -> None:
        super().__init__()
        group = get_tp_group()
        if num_experts % group.world_size:
            raise ValueError(f"tensor_parallel_size={group.world_size} does not divide a layer's {num_experts} experts")
        self.experts = Shard.even(num_experts, group)
        self.activation = partial(_of_alternating, activation) if alternates else activation
        self.weighs_inputs, self.has_bias = weighs_inputs, bias
        self.method: LinearMethod = UNQUANTIZED
        self._like = self.like = torch.empty(1)
        # AdaptedExperts adds adapters' products.
        self.adapters: Callable[..., Tensor | None] | None = None
        self._first = _FIRST if gated else _FIRST[1:]
        self.shapes = {name: (size, hidden_size) for name in self._first} | {"down_proj": (hidden_size, size)}
        count = len(self.experts.held)
        self.first = PackedExperts.empty(count, gated=gated and not alternates)
        self.second = PackedExperts.empty(count)
        self._slots: dict[str, WeightSlot] = {}
        # By expert and whether it is the first product, those that lack tensors.
        self._read: dict[tuple[int, bool], _Read] = {}
        # Guards `put` and the count, as several threads pack.
        self._lock = threading.Lock()
        # Products that have no weight yet.
        self._num_missing = 2 * count

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], int32 ids [T, K] and float32 weights [T, K] of each token's experts -> [T, H]."""
        if self.adapters is not None:
            adapted = self.adapters(x, ids, weights)
            if adapted is not None:
                return adapted
        first_expert = self.experts.held.start
        return experts(x, ids, weights, self.first, self.second, self.activation, first_expert, self.weighs_inputs)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where each expert's tensors go."""
        if not self._slots:
            self._slots = dict(self._make_slots())
        return self._slots

    def _make_slots(self) -> Iterator[tuple[str, WeightSlot]]:
        # Memory is taken when an expert is packed.
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in self.shapes.items()}
        if self.has_bias:
            shapes |= {f"{name}.bias": shape[:1] for name, shape in self.shapes.items()}
        places = {
            name: (self._like.new_empty(1).expand(shape), tuple(map(Shard.whole, shape)))
            for name, shape in shapes.items()
        }
        for expert in range(self.experts.size):
            is_held = expert in self.experts.held
            for name, (target, shards) in places.items():
                take = partial(self._take, expert - self.experts.held.start, name) if is_held else None
                yield f"{expert}.{name}", ExpertSlot(target, shards, take=take)

    def _take(self, index: int, name: str, value: Tensor | QuantizedWeight) -> None:
        part, _, kind = name.partition(".")
        is_first = part in self._first
        read = self._read.setdefault((index, is_first), _Read())
        if isinstance(value, QuantizedWeight):
            read.weights[part] = value.to(self._like.device)
        elif kind == "weight":
            read.weights[part] = value.to(self._like.device, self._like.dtype).contiguous()
        else:
            read.biases[part] = value.to(self._like.device, self._like.dtype)
        names = self._first if is_first else ("down_proj",)
        if len(read.weights) == len(names) and len(read.biases) == (len(names) if self.has_bias else 0):
            del self._read[index, is_first]
            weights = [read.weights[name] for name in names]
            bias = torch.cat([read.biases[name] for name in names]) if self.has_bias else None
            pack = partial(self._pack, self.first if is_first else self.second, index, weights, bias)
            if all(isinstance(weight, Tensor) for weight in weights) and self._like.device.type == "cpu":
                hand_over(pack)
            else:
                pack()

    def _pack(
        self, experts: PackedExperts, index: int, weights: list[Tensor | QuantizedWeight], bias: Tensor | None
    ) -> None:
        method, packed = pack_expert(experts, weights, bias, self.method)
        if isinstance(packed, PackedLinear) and packed.weight is weights[0]:
            # It may be mapped from a file.
            packed.weight = packed.weight.clone()
        with self._lock:
            experts.put(index, packed, method.apply)
            self._num_missing -= 1
            is_last = not self._num_missing
        if is_last:
            # Packed tensors are freed in pieces that glibc keeps: as much as the layer takes.
            return_freed_memory()

    @property
    def lacking(self) -> str | None:
        """A tensor that an expert lacks of which others have been given."""
        for (index, is_first), read in self._read.items():
            for name in self._first if is_first else ("down_proj",):
                for kind, given in (("weight", read.weights), ("bias", read.biases if self.has_bias else {name: None})):
                    if name not in given:
                        return f"{self.experts.held[index]}.{name}.{kind}"
        return None

    @property
    def asks_for_counts(self) -> bool:
        """Whether its loaded experts are multiplied one by one."""
        return not takes_all_experts(self._like, self.first, self.second, self.activation)

    def restore_lacking(self) -> None:
        """Pack what lacks tensors with the former ones, where their values are kept."""
        for (index, is_first), read in list(self._read.items()):
            packed = (self.first if is_first else self.second).packed[index]
            if not isinstance(packed, PackedLinear):
                continue
            names = self._first if is_first else ("down_proj",)
            weight, bias = unpack_linear(packed, self._like.dtype)
            given = {f"{name}.weight" for name in read.weights} | {f"{name}.bias" for name in read.biases}
            former = {f"{name}.weight": rows for name, rows in zip(names, weight.chunk(len(names)), strict=True)}
            if bias is not None:
                former |= {f"{name}.bias": rows for name, rows in zip(names, bias.chunk(len(names)), strict=True)}
            for name in former.keys() - given:
                self._take(index, name, former[name])

    def check_update(self) -> None:
        """See LinearBase.check_update."""
        if any(apply in (QUANTIZED.apply, PARTS.apply) for apply in (*self.first.applies, *self.second.applies)):
            raise keeps_quantized("a mixture's experts")


def asks_for_counts(model: nn.Module) -> bool:
    """Whether steps on a GPU wait for it, to learn how many tokens each expert has: graphs cannot hold them."""
    return any(isinstance(module, Experts) and module.asks_for_counts for module in model.modules())
