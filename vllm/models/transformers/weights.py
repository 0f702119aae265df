"""A checkpoint's tensors under the names and in the shapes that transformers' module has now."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vllm.layers.weight_update import same
from vllm.models.transformers.experts import is_experts
from vllm.quantization.stored import Value
from vllm.quantization.weight import QuantizedStack, QuantizedWeight
from vllm.utils.host_memory import is_out_of_memory

_Named = tuple[str, Value]
# The pattern that took a tensor, and the tensor.
_Part = tuple[str, Value]


class CheckpointNames:
    """The renamings and merges of tensors that transformers does when it loads a model of this class."""

    def __init__(self, model: Any, gates_are_halves: bool = False) -> None:
        """`model`: a PreTrainedModel as it was built, on the meta device. For `gates_are_halves` see the function."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        steps = get_model_conversion_mapping(model)
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]
        self._converters += _plain_experts(model, self._converters, gates_are_halves)
        self._by_pattern = {pattern: step for step in self._converters for pattern in step.source_patterns}
        self._state: dict[str, Any] = dict(model.state_dict())
        self._prefix = model.base_model_prefix
        self._model = model
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._buffers = {name for name, _ in model.named_buffers()}
        patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in patterns]
        # By target, how many tensors of the checkpoint made it, and those of an update until all have come.
        self._num_parts: dict[str, int] = {}
        self._waiting: dict[str, dict[str, _Part]] = {}

    def convert(self, tensors: Iterable[_Named]) -> Iterator[_Named]:
        """A checkpoint's tensors as the module names them. Merged ones come last; a tied one comes under its source's
        name."""
        yield from self._convert(tensors, is_whole=True)

    def convert_update(self, tensors: Iterable[_Named]) -> Iterator[_Named]:
        """As `convert`, of tensors that come in several calls: what is merged waits for the others, as a copy."""
        yield from self._convert(tensors, is_whole=False)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Tensors that wait for others are as before where an update fails."""
        before = {target: dict(parts) for target, parts in self._waiting.items()}
        try:
            yield
        except BaseException:
            self._waiting = before
            raise

    @property
    def lacking(self) -> str | None:
        """The tensors that an update still lacks, in words."""
        for target, parts in self._waiting.items():
            count = self._count(target, parts)
            return f"{count - len(parts)} of the {count} tensors of {target}"
        return None

    def _count(self, target: str, parts: dict[str, _Part]) -> int:
        """How many tensors make the target."""
        from transformers.core_model_loading import MergeModulelist

        if target in self._num_parts:
            return self._num_parts[target]
        converter = self._by_pattern[next(iter(parts.values()))[0]]
        is_stack = any(isinstance(step, MergeModulelist) for step in converter.operations)
        return len(converter.source_patterns) * (len(self._state[target]) if is_stack else 1)

    def _convert(self, tensors: Iterable[_Named], is_whole: bool) -> Iterator[_Named]:
        merged = {target: dict(parts) for target, parts in self._waiting.items()}
        tied: dict[str, tuple[str, Value]] = {}
        sources, given = set(self._tied.values()), dict[str, Value]()
        seen: set[str] = set()
        for name, tensor in tensors:
            renamed, pattern = self._rename(name)
            if pattern is not None and renamed in self._state:
                merged.setdefault(renamed, {})[name] = (pattern, tensor)
            elif renamed in self._tied:
                tied[self._tied[renamed]] = name, tensor
            elif not self._is_ignored(renamed):
                seen.add(renamed)
                if renamed in sources:
                    given[renamed] = tensor
                yield renamed, tensor
        for target, parts in merged.items():
            if is_whole:
                self._num_parts[target] = len(parts)
            elif len(parts) < self._count(target, parts):
                self._wait(target, parts)
                continue
            self._waiting.pop(target, None)
            for renamed, tensor in self._merge(target, [(name, *part) for name, part in parts.items()]):
                seen.add(renamed)
                yield renamed, tensor
        for source, (name, tensor) in tied.items():
            if source in given and not same(given[source], tensor):
                raise ValueError(f"{name} differs from {source}, but the model ties them: they must be equal")
            if source not in seen:
                yield source, tensor

    def _wait(self, target: str, parts: dict[str, _Part]) -> None:
        held = self._waiting.setdefault(target, {})
        for name, (pattern, value) in parts.items():
            if name not in held or held[name][1] is not value:
                held[name] = (pattern, value.clone() if isinstance(value, Tensor) else value)

    def _rename(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        place = self._prefix, self._state
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, *place)
        if renamed not in self._state and name in self._state:
            return rename_source_key(name, [], [], *place)
        return renamed, pattern

    def _is_ignored(self, name: str) -> bool:
        if name in self._state:
            return False
        return name in self._buffers or any(pattern.search(name) for pattern in self._ignored)

    def _merge(self, target: str, parts: list[tuple[str, str, Value]]) -> Iterator[_Named]:
        quantized = [value for _, _, value in parts if isinstance(value, QuantizedWeight)]
        if len(quantized) < len(parts):
            if quantized:
                plain = next(name for name, _, value in parts if not isinstance(value, QuantizedWeight))
                raise ValueError(
                    f"{plain} is not quantised, but {quantized[0].source} is: all parts of {target} must be, or none"
                )
            yield from self._merge_tensors(target, parts)
            return
        _check_shapes(parts)
        # Merge the numbers of all rows as tensors would be.
        starts = torch.tensor([0, *(value.shape[0] for value in quantized)]).cumsum(0)
        rows = [torch.arange(start, end)[:, None] for start, end in pairwise(starts.tolist())]
        numbered = [(name, pattern, own) for (name, pattern, _), own in zip(parts, rows, strict=True)]
        for name, numbers in self._merge_tensors(target, numbered):
            yield name, _stack(numbers, quantized, starts)

    def _merge_tensors(self, target: str, parts: list[tuple[str, str, Any]]) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import dot_natural_key

        converter: Any = copy.deepcopy(self._by_pattern[parts[0][1]])
        for name, pattern, tensor in sorted(parts, key=lambda part: dot_natural_key(part[0])):
            converter.add_tensor(target, name, pattern, lambda tensor=tensor: tensor)
        try:
            converted = converter.convert(target, model=self._model, config=self._model.config)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            names = ", ".join(name for name, _, _ in parts[:2])
            raise ValueError(f"{names} and other parts of {target} do not fit each other: {error}") from error
        for name, value in converted.items():
            yield name, value[0] if isinstance(value, list) else value


def _check_shapes(parts: list[tuple[str, str, Any]]) -> None:
    """ValueError: quantised weights of one kind have different shapes, or all of them different inputs."""
    usual: dict[str, QuantizedWeight] = {}
    for _, pattern, value in parts:
        first = usual.setdefault(pattern, value)
        if value.shape != first.shape:
            raise ValueError(f"{value.source} is of shape {value.shape}, but {first.source} of {first.shape}")
    first = parts[0][2]
    for value in usual.values():
        if value.shape[1] != first.shape[1]:
            raise ValueError(f"{value.source} has {value.shape[1]} inputs, but {first.source} {first.shape[1]}")


def _plain_experts(model: Any, converters: list[Any], gates_are_halves: bool) -> list[Any]:
    """For experts whose published checkpoints have other names: the usual ones of single experts, which quantisers give
    all of them."""
    from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose, WeightConverter

    known = {pattern for step in converters for pattern in step.source_patterns}
    found = [module for _, module in model.named_modules() if is_experts(module) and module.has_gate]
    if not found or any(pattern.endswith("experts.*.gate_proj.weight") for pattern in known):
        return []
    own = found[0]
    alternates = not own.is_concatenated and not gates_are_halves
    merged: list[Any] = [MergeModulelist(dim=0)]
    joined = [*merged, Concatenate(dim=1), *([Interleave(dim=1, inverse=True)] if alternates else [])]
    turned = [Transpose(1, 2)] if own.is_transposed else []

    def steps(ending: str, stacks: str, last: list[Any]) -> list[Any]:
        gates = [f".experts.*.{name}_proj.{ending}" for name in ("gate", "up")]
        return [
            WeightConverter(gates, f".experts.gate_up_proj{stacks}", operations=joined + last),
            WeightConverter(f".experts.*.down_proj.{ending}", f".experts.down_proj{stacks}", operations=merged + last),
        ]

    return steps("weight", "", turned) + (steps("bias", "_bias", []) if own.has_bias else [])


def _stack(numbers: Tensor, weights: list[QuantizedWeight], starts: Tensor) -> QuantizedStack:
    """Experts' weights by the numbers [E, ...] of their rows among those of `weights`, which begin at `starts`."""
    experts, orders = [], []
    for own in numbers.flatten(1):
        owners = torch.searchsorted(starts, own, right=True) - 1
        runs = torch.unique_consecutive(owners, return_counts=True)
        order = None
        if len(runs[0]) > len(owners.unique()):
            # Rows that alternate between weights: those of one weight stay together.
            order = owners.argsort(stable=True)
            own, runs = own[order], torch.unique_consecutive(owners[order], return_counts=True)
        pieces = zip(runs[0].tolist(), own.split(runs[1].tolist()), strict=True)
        experts.append([weights[owner].take_rows(rows - starts[owner]) for owner, rows in pieces])
        orders.append(order)
    return QuantizedStack(experts, orders)
