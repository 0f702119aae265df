"""Products and embeddings whose rows may go through adapters (LoRA), a different one each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.layers.activation import SILU_AND_MUL
from vllm.layers.layernorm import AdaptableNorm
from vllm.layers.linear import LinearBase
from vllm.layers.linear_method import before_gate, takes_adapters
from vllm.layers.sharding import Shard
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.ops.adapted_linear import AdaptedWeights
from vllm.ops.add_lora import RANK_GROUP, add_lora_, add_lora_embedding_, grouped_ranks, rank_groups
from vllm.ops.packed_linear import PackedLinear, packed_linear
from vllm.ops.rms_norm import AddedNorm


class AdapterRows(NamedTuple):
    """Rows by adapter, as `add_lora_` takes them; in `order` those without one follow the others."""

    order: Tensor  # int32 [T]
    starts: Tensor  # int32 [L + 1]

    def of(self, adapter: int) -> Tensor:
        """int64: the rows of one. Waits for the device."""
        first, end = self.starts[adapter : adapter + 2].tolist()
        return self.order[first:end].long()


class AdapterStacks:
    """L adapters of a layer, all zero at first; gain and shift are None until an adapter has them."""

    def __init__(self, sizes: Sequence[int], width: int, like: Tensor, num_adapters: int, max_rank: int) -> None:
        """`sizes` and `width` are what b's and a's parts hold; `like` has the dtype and the device of what is
        multiplied with."""
        columns = [0, *accumulate(sizes)]
        self._columns, self._groups, self._like = columns, rank_groups(max_rank), like
        self._a = like.new_zeros(num_adapters, len(sizes) * self._groups, width, RANK_GROUP)
        self._b = like.new_zeros(num_adapters, self._groups * RANK_GROUP, columns[-1])
        self._ranks = torch.zeros(num_adapters, len(sizes), dtype=torch.int32, device=like.device)
        self._scales = torch.zeros(num_adapters, len(sizes), dtype=torch.float32, device=like.device)
        self._borders = torch.tensor(columns, dtype=torch.int32, device=like.device)
        self.gain: Tensor | None = None
        self.shift: Tensor | None = None

    def clear(self, adapter: int) -> None:
        """Let it change nothing."""
        self._ranks[adapter] = 0
        self.put_vectors(adapter, None, None)

    def put(self, adapter: int, part: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Let it add scale (x a^T) b^T to a part's outputs; a [r, K], b [N_p, r]."""
        rank, first = len(a), part * self._groups
        self._a[adapter, first : first + self._groups] = grouped_ranks(a.to(self._a), self._groups)
        self._b[adapter, :rank, self._columns[part] : self._columns[part + 1]] = b.T
        self._ranks[adapter, part] = rank
        self._scales[adapter, part] = scale

    def put_vectors(self, adapter: int, gain: Tensor | None, shift: Tensor | None) -> None:
        """Let it make outputs y of the layer y (1 + gain) + shift before it adds to them; [N], None = 0."""
        if self.gain is None or self.shift is None:
            if gain is None and shift is None:
                return
            shape = len(self._ranks), self._columns[-1]
            self.gain = torch.zeros(shape, dtype=torch.float32, device=self._like.device)
            self.shift = torch.zeros_like(self.gain)
        for kept, given in ((self.gain, gain), (self.shift, shift)):
            kept[adapter] = 0 if given is None else given

    def add_(self, out: Tensor, x: Tensor, rows: AdapterRows) -> Tensor:
        """`out` [T, N] with what the rows' adapters change, in place, where x [T, K] was multiplied."""
        tables = self._a, self._b, self._ranks, self._scales, self._borders
        add_lora_(*(out, x, *rows, *tables, self.gain, self.shift))
        return out

    def add_embedding_(self, out: Tensor, ids: Tensor, rows: AdapterRows) -> Tensor:
        """The same where tokens [T] were looked up."""
        add_lora_embedding_(*(out, ids, *rows, self._a, self._b, self._ranks, self._scales, self._borders))
        return out


class StepAdapters:
    """Which rows of a step go through which adapter: one for all layers of a model.

    A layer's rows are the step's tokens or, behind the last block's attention, those whose results are needed, and
    their number says which: where it is the same, so are the rows.
    """

    def __init__(self) -> None:
        self._rows: Mapping[int, AdapterRows] = {}

    def use_one(self, adapter: int | None, num_adapters: int) -> None:
        """As `use`, where all rows go through one, however many there are."""
        self._rows = {} if adapter is None else _AllRows(adapter, num_adapters)

    def use(self, rows: Mapping[int, AdapterRows]) -> None:
        """Until the next call, layers take these, by the number of rows; without any, no row has an adapter."""
        self._rows = rows

    def of(self, num_rows: int) -> AdapterRows | None:
        """None: no row has an adapter."""
        return self._rows[num_rows] if self._rows else None


class _AllRows(dict[int, AdapterRows]):
    """All rows, for any number of them."""

    def __init__(self, adapter: int, num_adapters: int) -> None:
        super().__init__()
        self._adapter, self._num_adapters = adapter, num_adapters
        self[0] = self.__missing__(0)

    def __missing__(self, num_rows: int) -> AdapterRows:
        starts = torch.zeros(self._num_adapters + 1, dtype=torch.int32)
        starts[self._adapter + 1 :] = num_rows
        return AdapterRows(torch.arange(num_rows, dtype=torch.int32), starts)


@dataclass(frozen=True)
class AdapterPlace:
    """Where a matrix of the checkpoint is in a model.

    Attributes:
        module: the layer that has it.
        part: its index among those of which the layer is made.
        rows, inputs: what this rank holds of its rows and columns.
        prepare: puts its whole rows into the layer's order.
    """

    module: Any
    part: int
    rows: Shard
    inputs: Shard
    prepare: Callable[[Tensor], Tensor] | None = None

    def held(self, rows: Tensor) -> Tensor:
        """The rank's part of the checkpoint's `rows`, [rows] or [rows, ...], in the layer's order."""
        if self.prepare is not None:
            rows = self.prepare(rows)
        return rows[self.rows.held.start : self.rows.held.stop]


@dataclass
class AdapterPart:
    """An adapter's addition to one matrix, of this rank's share: s (x A^T) B^T.

    Attributes:
        a: [r, inputs held].
        b: [rows held, r], in the layer's order.
        scale: s.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass
class LayerChange:
    """An adapter's change of a layer.

    Attributes:
        parts: by index, what is added.
        gain, shift: float32 [outputs held], of out (1 + gain) + shift; None = 0.
        weights: by index, a whole weight [rows held, inputs held] in place of the layer's, with its bias.
        table: the same of an embedding, [rows held, H].
        tokens: of an embedding or a head, some rows that take the place of the layer's.
        norm: of a norm, its weight and bias.
    """

    parts: dict[int, AdapterPart] = field(default_factory=dict)
    gain: Tensor | None = None
    shift: Tensor | None = None
    weights: dict[int, PackedLinear] = field(default_factory=dict)
    table: Tensor | None = None
    tokens: TokenRows | None = None
    norm: tuple[Tensor, Tensor | None] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether more than products are added."""
        return bool(self.weights) or any(each is not None for each in (self.table, self.tokens, self.norm))


@dataclass
class TokenRows:
    """Rows of a table of tokens.

    Attributes:
        ids: int64 [n], those that the rank holds, numbered from its first one.
        weight: [n, H], of a head packed, with its bias.
        place_of: int64 [tokens held], of each the index in `ids`, or -1.
    """

    ids: Tensor
    weight: PackedLinear | Tensor
    place_of: Tensor


def adapter_places(model: nn.Module) -> dict[str, AdapterPlace]:
    """The places of a model's matrices, by the names of their weights. The model's weights are not packed yet, and
    those of gated layers will be packed such that adapters can be added before the gate."""
    places: dict[str, AdapterPlace] = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and module.takes_adapters:
            module.is_adapted = True
            parent, slots = name.rpartition(".")[0], module.checkpoint_slots()
            for index, (part, rows) in enumerate(module.parts.items()):
                slot = slots.get(f"{part}.weight")
                if slot is not None:
                    own = f"{parent}.{part}.weight" if parent else f"{part}.weight"
                    places[own] = AdapterPlace(module, index, rows, module.inputs, slot.prepare)
        elif isinstance(module, ParallelLMHead | VocabParallelEmbedding):
            rows = Shard(module.vocab_size, module.vocab_range)
            places[f"{name}.weight"] = AdapterPlace(module, 0, rows, Shard.whole(module.width))
        elif isinstance(module, WideLinear | ModuleLinear):
            places[f"{name}.weight"] = AdapterPlace(
                module, 0, Shard.whole(len(module.weight)), Shard.whole(module.width)
            )
        elif isinstance(module, AdaptableNorm) and module.takes_adapters:
            for kind, slot in module.checkpoint_slots().items():
                if kind in ("weight", "bias"):
                    shards = (*slot.shards, Shard.whole(1))
                    places[f"{name}.{kind}"] = AdapterPlace(module, 0, shards[0], shards[1], slot.prepare)
    return places


class WideLinear(nn.Module):
    """x W^T + b in float32, whatever the model's dtype."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.float32), requires_grad=False) if bias else None
        self.adapters: Callable[..., Tensor] | None = None
        self.empty, self.width = self.weight.new_empty(0), inputs

    def forward(self, x: Tensor) -> Tensor:
        if self.adapters is not None:
            return self.adapters(self.multiply, x.float(), None)
        return self.multiply(x.float())

    def multiply(self, x: Tensor, packed: None = None, norm: None = None) -> Tensor:
        """The product of float32 x [R, inputs]."""
        return F.linear(x, self.weight, self.bias)


class ModuleLinear(nn.Linear):
    """A linear of a transformers module, [..., K] -> [..., N], whose class is set when the module has been built.

    Attributes:
        was_called: whether the module has multiplied by it.
    """

    adapters: Callable[..., Tensor] | None
    was_called: bool

    @property
    def empty(self) -> Tensor:
        """[0], of the dtype and on the device of what is multiplied with."""
        return self.weight.data.new_empty(0)

    @property
    def width(self) -> int:
        """Its inputs."""
        return self.in_features

    def forward(self, x: Tensor) -> Tensor:
        self.was_called = True
        if self.adapters is None:
            return self.multiply(x)
        return self.adapters(self.multiply, x.reshape(-1, self.in_features)).view(*x.shape[:-1], -1)

    def multiply(self, x: Tensor, packed: None = None, norm: None = None) -> Tensor:
        """The product."""
        return F.linear(x, self.weight, self.bias)


class _Stacks:
    """The adapters of one layer, in L rows of memory that stays where it is from the first adapter on that changes it.

    Attributes:
        is_used: whether an adapter has, or had, a part of this layer. Stays so: steps are recorded with the products or
            without them.
    """

    def __init__(
        self, sizes: Sequence[int], width: int, like: Tensor, step: StepAdapters, num_adapters: int, max_rank: int
    ) -> None:
        """`sizes` and `width` are what b's and a's parts hold; `like` has the dtype and the device of what is
        multiplied with."""
        self.is_used = False
        self._step, self._like, self._num_adapters = step, like, num_adapters
        self._sizes, self._width, self._max_rank = sizes, width, max_rank
        self._columns = [0, *accumulate(sizes)]
        self._whole: dict[int, LayerChange] = {}  # by row, those that have whole weights
        self._memory: AdapterStacks | AdaptedWeights

    def _allocate(self) -> None:
        self._memory = AdapterStacks(self._sizes, self._width, self._like, self._num_adapters, self._max_rank)

    def put(self, row: int, change: LayerChange | None) -> bool:
        """Make an adapter's change that of `row`. True: steps that were recorded before are out of date."""
        if change is None and not self.is_used:
            return False
        was_used = self.is_used
        if not was_used:
            self._allocate()
            self.is_used = True
        change = change or LayerChange()
        had_vectors = self._memory.gain is not None
        self._memory.clear(row)
        for index, part in change.parts.items():
            self._memory.put(row, index, part.a, part.b, part.scale)
        self._memory.put_vectors(row, change.gain, change.shift)
        self._whole.pop(row, None)
        if change.is_whole:
            self._whole[row] = change
        return not was_used or had_vectors != (self._memory.gain is not None)


class AdaptedProduct(_Stacks):
    """A linear layer calls this in place of its product."""

    def __init__(self, *args: Any, packed: Any = None) -> None:
        """As _Stacks. `packed`: the layer's weight, by whose kind adapters are added in the product's operation, or
        behind it."""
        super().__init__(*args)
        self._is_gated, self._is_fused = getattr(packed, "gated", False), takes_adapters(packed)
        assert self._is_fused or not self._is_gated

    def _allocate(self) -> None:
        if not self._is_fused:
            return super()._allocate()
        sizes = self._sizes, self._width, self._is_gated, self._like
        self._memory = AdaptedWeights(*sizes, self._num_adapters, self._max_rank)

    def __call__(
        self, apply: Callable[..., Tensor], x: Tensor, packed: Any = None, norm: AddedNorm | None = None
    ) -> Tensor:
        """The layer's product, apply(x, packed, norm=norm), with what the rows' adapters change."""
        rows = self._step.of(len(x)) if self.is_used else None
        if rows is None:
            return apply(x, packed, norm=norm)
        if norm is not None and (self._whole or not self._is_fused):
            x, norm = norm(x), None
        if isinstance(self._memory, AdaptedWeights):
            out = apply(x, packed, norm=norm, adapters=self._memory.of(*rows))
        else:
            out = self._memory.add_(apply(x, packed), x, rows)
        for adapter, change in self._whole.items():
            own = rows.of(adapter)
            if len(own):
                out[own] = self._replaced(apply, x[own], packed, out[own], adapter, change)
        return out

    def _replaced(
        self, apply: Callable[..., Tensor], x: Tensor, packed: Any, out: Tensor, adapter: int, change: LayerChange
    ) -> Tensor:
        """`out`, the product of rows that have one adapter, with that of its whole weights in place of their parts'."""
        if self._is_gated:
            assert isinstance(self._memory, AdaptedWeights)
            rows = _AllRows(adapter, self._num_adapters)[len(x)]
            out = before_gate(apply, x, packed, adapters=self._memory.of(*rows))
        inputs = x.to(self._like.dtype)
        for part, weight in change.weights.items():
            product = packed_linear(inputs, weight, float_out=True)
            out[:, self._columns[part] : self._columns[part + 1]] = product.to(out.dtype)
        if change.tokens is not None and isinstance(change.tokens.weight, PackedLinear):
            out[:, change.tokens.ids] = packed_linear(inputs, change.tokens.weight, float_out=True).to(out.dtype)
        return SILU_AND_MUL(out) if self._is_gated else out


class AdaptedEmbedding(_Stacks):
    """An embedding calls this with what it has looked up: A's columns, and the rows of whole weights, are tokens."""

    def __call__(self, out: Tensor, ids: Tensor) -> Tensor:
        """`out` [T, H] with what the adapters of tokens `ids` (numbered from the rank's first one) change, in place."""
        rows = self._step.of(len(ids)) if self.is_used else None
        if rows is None:
            return out
        assert isinstance(self._memory, AdapterStacks)
        if self._memory.gain is not None:
            for adapter, gain in enumerate(self._memory.gain):
                own = rows.of(adapter)
                out[own] = (out[own] * (1 + gain)).to(out.dtype)
        self._memory.add_embedding_(out, ids, rows)
        for adapter, change in self._whole.items():
            own = rows.of(adapter)
            tokens = ids[own].long()
            held = (tokens >= 0) & (tokens < self._width)
            own, tokens = own[held], tokens[held]
            if change.table is not None:
                out[own] = change.table[tokens].to(out.dtype)
            if change.tokens is not None and isinstance(change.tokens.weight, Tensor):
                places = change.tokens.place_of[tokens]
                out[own[places >= 0]] = change.tokens.weight[places[places >= 0]].to(out.dtype)
        return out
