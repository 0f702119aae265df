"""Linears whose rows may go through adapters (LoRA), a different one each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm.layers.linear import LinearBase
from vllm.layers.sharding import Shard
from vllm.ops.add_lora import RANK_GROUP, add_lora_, grouped_ranks, rank_groups
from vllm.ops.rms_norm import AddedNorm


class AdapterRows(NamedTuple):
    """Rows by adapter, as `add_lora_` takes them."""

    order: Tensor  # int32 [T]
    starts: Tensor  # int32 [L + 1]


class StepAdapters:
    """Which rows of a step go through which adapter: one for all layers of a model.

    A layer's rows are the step's tokens or, behind the last block's attention, those whose results are needed, and
    their number says which: where it is the same, so are the rows.
    """

    def __init__(self) -> None:
        self._rows: dict[int, AdapterRows] = {}

    def use(self, rows: dict[int, AdapterRows]) -> None:
        """Until the next call, layers take these, by the number of rows; without any, no row has an adapter."""
        self._rows = rows

    def of(self, num_rows: int) -> AdapterRows | None:
        """None: no row has an adapter."""
        return self._rows[num_rows] if self._rows else None


@dataclass(frozen=True)
class AdapterPlace:
    """Where a linear of the checkpoint is in a model.

    Attributes:
        module: the layer that has it.
        part: its index among those of which the layer is made.
        rows, inputs: what this rank holds of its outputs and inputs.
        prepare: puts its whole rows into the layer's order.
    """

    module: LinearBase
    part: int
    rows: Shard
    inputs: Shard
    prepare: Callable[[Tensor], Tensor] | None = None


@dataclass
class AdapterPart:
    """What an adapter adds to one linear, of this rank's share: s (x A^T) B^T.

    Attributes:
        a: [r, inputs held].
        b: [outputs held, r], its rows in the layer's order.
        scale: s.
    """

    a: Tensor
    b: Tensor
    scale: float


def adapter_places(model: nn.Module) -> dict[str, AdapterPlace]:
    """The places of a model's linears, by the names of their weights. The model's weights are not packed yet, and those
    of gated layers will be packed such that adapters can be added before the gate."""
    places: dict[str, AdapterPlace] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase) or not module.takes_adapters:
            continue
        module.is_adapted = True
        parent = name.rpartition(".")[0]
        slots = module.checkpoint_slots()
        for index, (part, rows) in enumerate(module.parts.items()):
            slot = slots.get(f"{part}.weight")
            if slot is not None:
                prefix = f"{parent}." if parent else ""
                places[f"{prefix}{part}.weight"] = AdapterPlace(module, index, rows, module.inputs, slot.prepare)
    return places


class AdaptedProduct:
    """The adapters of one layer, in L rows of memory that stays where it is.

    Attributes:
        is_used: whether an adapter has, or had, a part of this layer.
    """

    def __init__(self, layer: LinearBase, step: StepAdapters, num_adapters: int, max_rank: int) -> None:
        self._step = step
        sizes = [len(rows.held) for rows in layer.parts.values()]
        self._groups, inner = rank_groups(max_rank), len(layer.inputs.held)
        like = layer.empty
        self._a = like.new_zeros(num_adapters, len(sizes) * self._groups, inner, RANK_GROUP)
        self._b = like.new_zeros(num_adapters, self._groups * RANK_GROUP, sum(sizes))
        self._ranks = torch.zeros(num_adapters, len(sizes), dtype=torch.int32, device=like.device)
        self._scales = torch.zeros(num_adapters, len(sizes), dtype=torch.float32, device=like.device)
        self._columns = [0, *accumulate(sizes)]
        self._borders = torch.tensor(self._columns, dtype=torch.int32, device=like.device)
        # Stays so: steps are recorded with the products or without them.
        self.is_used = False

    def put(self, row: int, parts: dict[int, AdapterPart]) -> None:
        """Make an adapter's parts, by their indices, those of `row`."""
        self._ranks[row] = 0
        for index, part in parts.items():
            rank, first = len(part.a), index * self._groups
            self._a[row, first : first + self._groups] = grouped_ranks(part.a.to(self._a), self._groups)
            self._b[row, :rank, self._columns[index] : self._columns[index + 1]] = part.b.T
            self._ranks[row, index] = rank
            self._scales[row, index] = part.scale
            self.is_used = True

    def __call__(self, apply: Callable[..., Tensor], x: Tensor, packed: Any, norm: AddedNorm | None) -> Tensor:
        """The layer's product, apply(x, packed, norm=norm), with what the rows' adapters add."""
        rows = self._step.of(len(x)) if self.is_used else None
        if rows is None:
            return apply(x, packed, norm=norm)
        if norm is not None:
            x = norm(x)
        return add_lora_(apply(x, packed), x, *rows, self._a, self._b, self._ranks, self._scales, self._borders)
