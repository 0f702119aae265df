"""Where the modules that an adapter names are in a model: its layers may hold several of the checkpoint's side by side,
or rows in another order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vllm.layers.adapted import AdapterPart, AdapterPlace
from vllm.layers.weight_update import BASE_PREFIX, checkpoint_parts
from vllm.lora.adapter import LoraTensors


@dataclass(frozen=True)
class _Share:
    """A part of a module's outputs, and of its inputs, that is a linear of the model."""

    place: AdapterPlace
    outputs: Tensor  # int64, in the order of the linear's
    inputs: Tensor
    scales: Tensor  # float32, what the model multiplies each output's weights by


class ModuleMap:
    """Finds the linears of a model by the names of transformers' modules."""

    def __init__(self, model: nn.Module, places: Mapping[str, AdapterPlace]) -> None:
        self._model, self._places = model, places
        self._found: dict[tuple[str, int, int], list[_Share]] = {}

    def parts(self, file: str, module: str, tensors: LoraTensors) -> list[tuple[AdapterPlace, AdapterPart]]:
        """This rank's shares of an adapter's tensors, and whose they are.

        Raises:
            ValueError: the model has no such linear, or one of another shape; names `file` and the tensor.
        """
        key = module, len(tensors.b), tensors.a.shape[1]
        if key not in self._found:
            try:
                self._found[key] = self._find(*key)
            except ValueError as error:
                raise ValueError(f"{file}: {module}: {error}") from None
        return [(share.place, _held(share, tensors)) for share in self._found[key]]

    def _find(self, module: str, outputs: int, inputs: int) -> list[_Share]:
        shape = outputs, inputs
        # From 1 on, as a product with 0 is 0.
        rows = torch.arange(1, outputs + 1, dtype=torch.float64)[:, None].expand(shape)
        columns = torch.arange(1, inputs + 1, dtype=torch.float64)[None].expand(shape)
        probes = rows, columns, torch.ones(1, 1, dtype=torch.float64).expand(shape)
        failure: ValueError | None = None
        # Some checkpoints have weights of [inputs, outputs].
        for own in (probes, tuple(each.t() for each in probes)):
            try:
                shares = self._shares(f"{module}.weight", *own)
            except ValueError as error:
                failure = failure or error
                continue
            if shares is not None:
                return shares
        raise failure or ValueError("its weight's rows and columns do not stay apart in this model")

    def _shares(self, name: str, *probes: Tensor) -> list[_Share] | None:
        """What is done to the weight, done to the numbers of its outputs, of its inputs, and to ones. None: rows and
        columns get mixed."""
        shares = []
        for parts in zip(*(checkpoint_parts(self._model, name, probe) for probe in probes), strict=True):
            own = parts[0][0]
            place = self._places.get(own) or self._places.get(BASE_PREFIX + own)
            if place is None:
                raise ValueError("the model has no such layer that takes adapters")
            numbers = [values.double() for _, values in parts if isinstance(values, Tensor) and values.dim() == 2]
            if len(numbers) < len(parts):
                return None
            scales = _constant(numbers[2], 1)
            if scales is None or not scales.all():
                return None
            outputs, inputs = _constant(numbers[0] / scales[:, None], 1), _constant(numbers[1] / scales[:, None], 0)
            if outputs is None or inputs is None:
                return None
            expected, got = (place.rows.size, place.inputs.size), (len(outputs), len(inputs))
            if expected != got:
                raise ValueError(
                    f"the base model's weight is {expected}, [outputs, inputs], but the adapter's is {got}"
                )
            shares.append(_Share(place, outputs.round().long() - 1, inputs.round().long() - 1, scales.float()))
        if not shares:
            raise ValueError("the model has no such layer that takes adapters")
        return shares


def _constant(numbers: Tensor, dim: int) -> Tensor | None:
    """Numbers that are the same all along a dimension, once; None: they are not."""
    first = numbers.narrow(dim, 0, 1)
    return first.flatten() if torch.allclose(numbers, first.expand_as(numbers), rtol=1e-6, atol=0) else None


def _held(share: _Share, tensors: LoraTensors) -> AdapterPart:
    rows = tensors.b[share.outputs] * share.scales[:, None].to(tensors.b)
    if share.place.prepare is not None:
        rows = share.place.prepare(rows)
    held, inputs = share.place.rows.held, share.place.inputs.held
    return AdapterPart(
        tensors.a[:, share.inputs][:, inputs.start : inputs.stop].clone(),
        rows[held.start : held.stop].clone(),
        tensors.scale,
    )
