"""Where the modules that an adapter names are in a model: its layers may hold several of the checkpoint's side by side,
or rows in another order."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm.layers.absent import absent_names
from vllm.layers.adapted.products import AdapterPlace
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabShard
from vllm.layers.weight_update import BASE_PREFIX, checkpoint_parts


@dataclass(frozen=True)
class Share:
    """A part of a module's rows, and of its columns, that is a matrix of the model.

    Attributes:
        rows, columns: int64, in the order of the matrix.
        scales: float32, what the model multiplies each row by; 0: the model has a row of zeros there.
        fills: float32, of each column 1, or 0 where the model has zeros.
    """

    place: AdapterPlace
    rows: Tensor
    columns: Tensor
    scales: Tensor
    fills: Tensor

    def held_rows(self, values: Tensor) -> Tensor:
        """This rank's, in the layer's order, of what each of the module's rows has, [rows] or [rows, r]."""
        scales = self.scales if values.dim() == 1 else self.scales[:, None]
        return self.place.held(values.float()[self.rows] * scales)

    def held_columns(self, values: Tensor) -> Tensor:
        """The same of its columns, [r, columns]."""
        held = self.place.inputs.held
        return (values.float()[:, self.columns] * self.fills)[:, held.start : held.stop]


class ModuleMap:
    """Finds the matrices of a model by the names of transformers' modules."""

    def __init__(self, model: nn.Module, places: Mapping[str, AdapterPlace]) -> None:
        self._model, self._places = model, places
        self._absent = absent_names(model)
        self._found: dict[tuple[str, tuple[int, ...]], list[Share]] = {}

    def shares(self, name: str, *shape: int) -> list[Share]:
        """The shares of a weight [rows, columns], or of a stack [E, rows, columns] of experts'; none: the model does
        without it. ValueError: the model has none of that name, or one of another shape."""
        if (name, shape) not in self._found:
            self._found[name, shape] = self._find(name, shape)
        return self._found[name, shape]

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[AdapterPlace, str, Tensor]]:
        """This rank's parts of a whole tensor, a "weight" or a "bias", and whose they are; none and ValueError as
        `shares`."""
        for own, values in checkpoint_parts(self._model, name, tensor):
            module, _, kind = own.rpartition(".")
            if self._is_absent(own):
                continue
            place = (self._place(own) or self._place(f"{module}.weight")) if kind in ("weight", "bias") else None
            if place is None or not isinstance(values, Tensor):
                raise ValueError("the model has no such tensor that an adapter can replace")
            expected = (place.rows.size, place.inputs.size)[: values.dim()]
            if tuple(values.shape) != expected:
                raise ValueError(f"the base model's is {expected}, but the adapter's is {tuple(values.shape)}")
            held, inputs = place.held(values), place.inputs.held
            yield place, kind, held if held.dim() == 1 else held[:, inputs.start : inputs.stop]

    def tables(self, name: str, others: Container[str]) -> Iterator[Any]:
        """The embedding or head of a weight, and the head that shares it, unless that is among `others`."""
        for own, _ in checkpoint_parts(self._model, name, torch.empty(1, 1)):
            if self._is_absent(own):
                continue
            place = self._place(own)
            if place is None or not isinstance(place.module, VocabShard):
                raise ValueError("the model has no such table of tokens")
            yield place.module
            for head, module in self._model.named_modules():
                if isinstance(module, ParallelLMHead) and module.tied_to is place.module and head not in others:
                    yield module

    def _place(self, name: str) -> AdapterPlace | None:
        return self._places.get(name) or self._places.get(BASE_PREFIX + name)

    def _is_absent(self, name: str) -> bool:
        """Whether another stage has the weight."""
        return name in self._absent or BASE_PREFIX + name in self._absent

    def _find(self, name: str, shape: tuple[int, ...]) -> list[Share]:
        *_, num_rows, num_columns = shape
        # From 1 on, as a product with 0 is 0.
        rows = torch.arange(1, num_rows + 1, dtype=torch.float64)[:, None].expand(shape)
        columns = torch.arange(1, num_columns + 1, dtype=torch.float64)[None].expand(shape)
        probes = rows, columns, torch.ones(1, 1, dtype=torch.float64).expand(shape)
        failure: ValueError | None = None
        # Some checkpoints have weights of [inputs, outputs].
        for own in (probes, tuple(each.transpose(-1, -2) for each in probes)):
            try:
                shares = self._shares(name, *own)
            except ValueError as error:
                failure = failure or error
                continue
            if shares is not None:
                return shares
        raise failure or ValueError("its weight's rows and columns do not stay apart in this model")

    def _shares(self, name: str, *probes: Tensor) -> list[Share] | None:
        """The changes of the weight, applied to the numbers of its rows, of its columns, and to ones. None: rows and
        columns get mixed."""
        shares = []
        for parts in zip(*(checkpoint_parts(self._model, name, probe) for probe in probes), strict=True):
            if self._is_absent(parts[0][0]):
                continue
            place = self._place(parts[0][0])
            if place is None:
                raise ValueError("the model has no such layer that takes adapters")
            numbers = [values.double() for _, values in parts if isinstance(values, Tensor) and values.dim() == 2]
            if len(numbers) < len(parts):
                return None
            filled = numbers[2] != 0
            has_row, has_column = filled.any(1), filled.any(0)
            own = [each[has_row][:, has_column] for each in numbers]
            scales = _constant(own[2], 1)
            if scales is None or not own[2].all():
                return None
            of_rows, of_columns = _constant(own[0] / scales[:, None], 1), _constant(own[1] / scales[:, None], 0)
            if of_rows is None or of_columns is None:
                return None
            rows, columns = _spread(of_rows, has_row, 1), _spread(of_columns, has_column, 1)
            expected, got = (place.rows.size, place.inputs.size), (len(rows), len(columns))
            if expected != got:
                raise ValueError(f"the base model's weight is {expected}, but the adapter's is {got}")
            factors = _spread(scales, has_row, 0).float(), has_column.float()
            shares.append(Share(place, rows.round().long() - 1, columns.round().long() - 1, *factors))
        return shares


def _spread(values: Tensor, where: Tensor, rest: float) -> Tensor:
    """`values` at the places where it is so, `rest` at the others."""
    spread = values.new_full((len(where),), rest)
    spread[where] = values
    return spread


def _constant(numbers: Tensor, dim: int) -> Tensor | None:
    """Numbers that are the same all along a dimension, once; None: they are not."""
    first = numbers.narrow(dim, 0, 1)
    return first.flatten() if torch.allclose(numbers, first.expand_as(numbers), rtol=1e-6, atol=0) else None
