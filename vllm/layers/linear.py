"""Linear layers. Weights are loaded plain, then packed once into what the device multiplies fastest.

Each layer holds its rank's share of the weight. Widths in constructors are those of the whole model, widths in forward
methods the rank's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.distributed.communicator import split_kv_heads
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import SILU_AND_MUL, get_act_and_mul_fn
from vllm.layers.linear_method import PARTS, QUANTIZED, UNQUANTIZED, LinearMethod, keeps_quantized, pack_parts
from vllm.layers.sharding import Shard, WeightSlot, parameter_slots
from vllm.ops.adapted_linear import adds_adapters
from vllm.ops.packed_linear import PackedLinear, unpack_linear
from vllm.ops.rms_norm import AddedNorm
from vllm.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.quantization.weight import QuantizedWeight
from vllm.utils.host_memory import read_later, scratch


class LinearMethodBase(QuantizeMethodBase):
    """How a linear layer holds its weight and multiplies with it: what a user's quantisation gives a layer."""

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the layer's parameters, in the sizes that this rank holds: `output_partition_sizes` are of the
        layer's parts, such as query, key and value. A parameter's attributes `output_dim` and `input_dim` say which of
        its dimensions follow the layer's outputs and inputs."""

    @abstractmethod
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs held] -> [T, outputs held]."""


class UnquantizedLinearMethod(LinearMethodBase):
    """A plain `weight` [outputs held, inputs held], in the model's dtype."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        weight = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        for name, value in {"output_dim": 0, "input_dim": 1, **extra_weight_attrs}.items():
            setattr(layer.weight, name, value)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight: Any = layer.weight
        return F.linear(x, weight, bias)


@dataclass
class _Own:
    """In place of a packed weight, where a user's method multiplies."""

    gated: bool = False


class LinearBase(nn.Module):
    """y = x W^T + b, where W may be several of a checkpoint's matrices, stacked to be one product.

    Args:
        inputs: which of W's columns the rank holds, and so which part of x it takes.
        parts: by checkpoint name, which rows of each stacked matrix the rank holds.
    """

    takes_adapters = True
    """Whether the layer's result is the product, to which an adapter's can be added."""
    needs_whole_weight = False
    """Whether packing takes the plain weight apart, and does not leave it to a method."""

    def __init__(self, inputs: Shard, parts: dict[str, Shard], bias: bool) -> None:
        super().__init__()
        # Set before weights are packed: a gate is then applied behind adapters.
        self.is_adapted = False
        # AdaptedProduct adds adapters' products.
        self.adapters: Callable[..., Tensor] | None = None
        self.inputs = inputs
        self.parts = parts
        self.prefix = ""
        self.quant_config: QuantizationConfig | None = None
        # Another one than this multiplies itself; what packs the weights of this one is `method`.
        self.quant_method: QuantizeMethodBase = UnquantizedLinearMethod()
        output_size = sum(len(rows.held) for rows in parts.values())
        weight = torch.empty(output_size, len(inputs.held))
        self.weight: nn.Parameter | None = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False)
        self.method: LinearMethod = UNQUANTIZED
        self.packed: Any
        # By part, what came quantised from the checkpoint, until it is packed.
        self._quantized: dict[str, QuantizedWeight] = {}
        # By part, plain values that stay where they are until they are packed, if they do.
        self._given: dict[str, Tensor] | None = None
        # The shape of the weight, and whether there is a bias, before they are packed.
        self._shape, self._has_bias = weight.shape, bias
        self._empty = weight.new_empty(0)

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        """[T, inputs held] -> [T, sum of the parts' rows held], of norm(x) where there is a norm."""
        return self.product(self.method.apply, x, norm)

    def product(self, apply: Callable[..., Tensor], x: Tensor, norm: AddedNorm | None) -> Tensor:
        """apply(x, packed, norm=norm), and what adapters add to it."""
        if self.adapters is None:
            return apply(x, self.packed, norm=norm)
        return self.adapters(apply, x, self.packed, norm)

    @property
    def empty(self) -> Tensor:
        """[0], of the dtype and on the device of what is multiplied with."""
        return self._empty

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where each checkpoint tensor goes, by its name within the parent module."""
        if self.holds_own_weight:
            return self._own_slots()
        slots: dict[str, WeightSlot] = {}
        start = 0
        for part, rows in self.parts.items():
            own = slice(start, start + len(rows.held))
            if self.weight is not None:
                slots[f"{part}.weight"] = WeightSlot(
                    self.weight.data[own],
                    (rows, self.inputs),
                    keep=partial(self._keep, part),
                    place=partial(self._weight_rows, own),
                    leave=partial(self._leave, part),
                )
            if self.bias is not None:
                slots[f"{part}.bias"] = WeightSlot(self.bias.data[own], (rows,))
            start = own.stop
        return slots

    @property
    def is_plain(self) -> bool:
        """Whether the packed weight is the checkpoint's, as it is."""
        return isinstance(self.packed, PackedLinear) and self.packed.layout == "plain"

    def check_update(self) -> None:
        """ValueError: new values cannot be taken: the weight came quantised from the checkpoint, or a user's method has
        it."""
        if self.holds_own_weight:
            raise ValueError(
                f"load_weights: {self.prefix} has the method {type(self.quant_method).__name__}, which holds its "
                "weights itself"
            )
        if self.method in (QUANTIZED, PARTS):
            raise keeps_quantized("/".join(self.parts))

    def begin_update(self) -> bool:
        """Make `checkpoint_slots` give places for new values. True: they are new memory, which
        process_weights_after_loading packs once all are filled; False: they are the memory in use."""
        if self.is_plain:
            weight, bias = self.packed.weight, self.packed.bias
        else:
            weight = self._empty.new_empty(self._shape)
            bias = self._empty.new_empty(self._shape[0]) if self._has_bias else None
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return not self.is_plain

    @property
    def keeps_values(self) -> bool:
        """Whether the packed weight has the values that were given, so that `restore_values` can."""
        return isinstance(self.packed, PackedLinear)

    def restore_values(self) -> None:
        """Give the memory of `begin_update` the values that are packed now."""
        assert self.weight is not None
        weight, bias = unpack_linear(self.packed, self._empty.dtype)
        self.weight.data.copy_(weight)
        if self.bias is not None and bias is not None:
            self.bias.data.copy_(bias)

    def use_quant_method(self, quant_method: QuantizeMethodBase) -> None:
        """Let a user's method hold the weight and multiply, in the model's dtype."""
        self.quant_method = quant_method
        self.weight = None
        quant_method.create_weights(
            self,
            input_size_per_partition=len(self.inputs.held),
            output_partition_sizes=[len(rows.held) for rows in self.parts.values()],
            input_size=self.inputs.size,
            output_size=sum(rows.size for rows in self.parts.values()),
            params_dtype=self._empty.dtype,
            # Upstream's methods take it out; see BasevLLMParameter.
            weight_loader=None,
        )

    @property
    def holds_own_weight(self) -> bool:
        """Whether a user's quantisation method has the weight and multiplies with it."""
        return type(self.quant_method) is not UnquantizedLinearMethod

    def _own_slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        for name, parameter in self.named_parameters(recurse=False):
            if name == "bias":
                parameter.output_dim = 0  # type: ignore[attr-defined]
            try:
                slots |= parameter_slots(name, parameter, self.parts, self.inputs)
            except ValueError as error:
                raise ValueError(f"{self.prefix}: {type(self.quant_method).__name__}: {error}") from None
        return slots

    def _multiply(self, x: Tensor, packed: _Own, float_out: bool = False, norm: AddedNorm | None = None) -> Tensor:
        return self.quant_method.apply(self, x if norm is None else norm(x), self.bias)

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        """Pack the loaded weight by `method` and free the plain one."""
        gated = gated and (not self.is_adapted or self._adds_before_gate)
        if self.holds_own_weight:
            self.quant_method.process_weights_after_loading(self)
            self.method, self.packed = replace(method, apply=self._multiply), _Own()
            return
        assert self.weight is not None
        bias = None if self.bias is None else self.bias.data
        if self._quantized:
            self.method, self.packed = pack_parts(self._loaded_parts(), bias, method, gated=gated)
            self._quantized.clear()
        else:
            self.method = method
            self.packed = method.pack(self._plain_weight(), bias, gated=gated)
        self.weight = self.bias = self._given = None

    @property
    def _adds_before_gate(self) -> bool:
        """Whether one operation multiplies, adds adapters and gates. Rounded inputs are of the weight alone."""
        is_rounded = any(weight.inputs is not None for weight in self._quantized.values())
        return adds_adapters(self._empty) and not is_rounded

    def defer_weight(self, takes_parts: bool = False) -> None:
        """Free the weight's memory until a tensor is loaded that is not quantised. `takes_parts`: what packs the weight
        takes it in parts, so that tensors of its dtype stay where they are until then."""
        assert self.weight is not None
        self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)
        self._given = {} if takes_parts and not self.needs_whole_weight else None

    def _leave(self, part: str, values: Tensor) -> bool:
        """Leave values of a part where they are. False: they have to be copied."""
        if self._given is None or values.dtype != self._empty.dtype or values.stride(1) != 1:
            return False
        self._given[part] = values
        read_later(values)
        return True

    def _plain_weight(self) -> Tensor | list[Tensor]:
        """The plain weight, whole or in parts."""
        assert self.weight is not None
        given = self._given or {}
        if given.keys() == self.parts.keys():
            return [given[part] for part in self.parts]
        start = 0
        for part, rows in self.parts.items():
            stop = start + len(rows.held)
            if part in given:
                self._weight_rows(slice(start, stop)).copy_(given[part])
            start = stop
        return self.weight.data

    def _keep(self, part: str, weight: QuantizedWeight) -> None:
        self._quantized[part] = weight.to(self._empty.device)

    def _weight_rows(self, rows: slice) -> Tensor:
        assert self.weight is not None
        if self.weight.is_meta:
            self.weight = nn.Parameter(scratch.empty(self._empty, *self._shape), requires_grad=False)
        return self.weight.data[rows]

    def _loaded_parts(self) -> list[Tensor | QuantizedWeight]:
        assert self.weight is not None
        sizes = [len(rows.held) for rows in self.parts.values()]
        return [
            self._quantized.get(part, plain)
            for part, plain in zip(self.parts, self.weight.data.split(sizes), strict=True)
        ]


class ColumnParallelLinear(LinearBase):
    """A linear whose outputs are split over the ranks."""

    def __init__(self, input_size: int, output_size: int, bias: bool, name: str) -> None:
        super().__init__(Shard.whole(input_size), {name: Shard.even(output_size, get_tp_group())}, bias)


class RowParallelLinear(LinearBase):
    """A linear whose inputs are split over the ranks; every rank gets the sum, or its part where not `is_summed`. The
    first rank adds the bias."""

    def __init__(self, input_size: int, output_size: int, bias: bool, name: str, is_summed: bool = True) -> None:
        group = get_tp_group()
        super().__init__(Shard.even(input_size, group), {name: Shard.whole(output_size)}, bias)
        self.group, self.is_summed = group, is_summed

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        part = super().forward(x, norm)
        return self.group.all_reduce(part) if self.is_summed else part

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        if self.group.rank > 0:
            self.bias = None
        super().process_weights_after_loading(method, gated)
        if self.method is PARTS and self.group.world_size > 1:
            self.packed.split_inputs(self.group)


class ReplicatedLinear(LinearBase):
    """A linear that every rank holds whole."""

    def __init__(self, input_size: int, output_size: int, bias: bool, name: str) -> None:
        super().__init__(Shard.whole(input_size), {name: Shard.whole(output_size)}, bias)


class StackedLinear(LinearBase):
    """Linears of the same input as one product, outputs side by side; `sizes` are their outputs by checkpoint name,
    and each one's are split over the ranks."""

    def __init__(self, input_size: int, sizes: dict[str, int], bias: bool) -> None:
        parts = {name: Shard.even(size, get_tp_group()) for name, size in sizes.items()}
        super().__init__(Shard.whole(input_size), parts, bias)


class GatedLinear(LinearBase):
    """The first layer of a gated MLP: act(x G^T) * (x U^T), with the checkpoint's gate_proj and up_proj; the outputs
    are split over the ranks. ValueError for an unknown activation."""

    def __init__(self, input_size: int, output_size: int, bias: bool, activation: str) -> None:
        rows = Shard.even(output_size, get_tp_group())
        super().__init__(Shard.whole(input_size), {"gate_proj": rows, "up_proj": rows}, bias)
        self.act_and_mul = get_act_and_mul_fn(activation)

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        out = super().forward(x, norm)
        return out if self.packed.gated else self.act_and_mul(out)

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        super().process_weights_after_loading(method, gated=self.act_and_mul is SILU_AND_MUL)


class QKVParallelLinear(LinearBase):
    """The query, key and value projections as one product, outputs side by side; `names` are those that there are.

    Query heads are split over the ranks, and so are key and value heads, unless there are more ranks than those: then
    several ranks hold the same one. `head_counts` are the rank's query, key and value heads. In the checkpoint the
    first `interleaved` rows of each query and key head are pairs that rotate together; here all second ones follow the
    first ones. ValueError: the ranks cannot share the key heads equally.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        interleaved: int = 0,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        group = get_tp_group()
        ranks = group.world_size
        if num_kv_heads % ranks and ranks % num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={ranks} does not fit a layer's {num_kv_heads} key/value heads: one must be a "
                "multiple of the other"
            )
        kv_heads = split_kv_heads(num_kv_heads, ranks)[group.rank]
        queries = Shard.even(num_heads * head_dim, group)
        keys = Shard(num_kv_heads * head_dim, range(kv_heads.start * head_dim, kv_heads.stop * head_dim))
        parts = {name: queries if name == "q_proj" else keys for name in names}
        super().__init__(Shard.whole(hidden_size), parts, bias)
        self.head_counts = [len(rows.held) // head_dim for rows in parts.values()]
        self._head_dim, self._interleaved = head_dim, interleaved

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        slots = super().checkpoint_slots()
        if not self._interleaved:
            return slots
        prepare = partial(separate_pairs, head_dim=self._head_dim, num_rotated=self._interleaved)
        turned = {name: slot for name, slot in slots.items() if not name.startswith("v_proj")}
        for name, slot in turned.items():
            if slot.shards[0].size != self.parts[name.split(".")[0]].size:
                raise ValueError(f"{self.prefix}: {name} must have a row for each output, whose order changes here")
        return slots | {name: replace(slot, prepare=prepare) for name, slot in turned.items()}


def separate_pairs(rows: Tensor, head_dim: int, num_rotated: int) -> Tensor:
    """[heads * head_dim, ...] with the first num_rotated rows of each head in the order 0, 2, 4 ... 1, 3, 5 ..."""
    heads = rows.unflatten(0, (-1, head_dim)).movedim(1, -1)
    return separate_pair_columns(heads, num_rotated).movedim(-1, 1).flatten(0, 1)


def separate_pair_columns(values: Tensor, num_rotated: int) -> Tensor:
    """[..., head_dim] with the first num_rotated values in the order 0, 2, 4 ... 1, 3, 5 ..."""
    rotated, rest = values[..., :num_rotated], values[..., num_rotated:]
    return torch.cat((rotated[..., ::2], rotated[..., 1::2], rest), dim=-1)
