"""New weights for a model that serves, by their checkpoint names: what trainers send between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vllm.layers.experts import Experts
from vllm.layers.linear import LinearBase
from vllm.layers.linear_method import LinearMethod
from vllm.layers.sharding import Shard, WeightSlot
from vllm.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.quantization.stored import Value
from vllm.quantization.weight import QuantizedStack, QuantizedWeight

# Checkpoints saved from the model without its head lack this prefix.
BASE_PREFIX = "model."
IGNORED_SUFFIX = "rotary_emb.inv_freq"
HEAD = "lm_head.weight"


def module_slots(module: nn.Module, name: str) -> dict[str, WeightSlot]:
    """Where the checkpoint tensors of the module called `name` go, by their Hugging Face names."""
    own = getattr(module, "checkpoint_slots", None)
    parent = name.rpartition(".")[0] if isinstance(module, LinearBase) else name
    slots = _whole_slots(module) if own is None else own()
    return {f"{parent}.{part}": slot for part, slot in slots.items()}


def _whole_slots(module: nn.Module) -> dict[str, WeightSlot]:
    """The slots of the parameters of a module that every rank holds whole."""
    return {
        name: WeightSlot(parameter.data, tuple(map(Shard.whole, parameter.shape)))
        for name, parameter in module.named_parameters(recurse=False)
    }


def checkpoint_parts(model: nn.Module, name: str, value: Value) -> Iterable[tuple[str, Value]]:
    """The model's names and tensors of a checkpoint's: none for what it computes itself, several for fused ones.
    ValueError: quantised experts, of which the model has none."""
    if name.endswith(IGNORED_SUFFIX):
        return ()
    read = getattr(model, "checkpoint_tensors", None)
    if read is None:
        return ((name, value),)
    if isinstance(value, QuantizedStack):
        return _stack_parts(read, name, value)
    return read(name, value) if isinstance(value, Tensor) else _quantized_parts(read, name, value)


def _quantized_parts(
    read: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]], name: str, value: QuantizedWeight
) -> list[tuple[str, Value]]:
    """Do to a quantised tensor's rows, by their numbers, what is done to those of another. Where more is done than
    ordering rows, it is done to the de-quantised values."""
    numbers = torch.arange(value.shape[0])
    parts = list(read(name, numbers))
    if not parts:
        return []
    if len(parts) == 1 and parts[0][1] is numbers:
        return [(parts[0][0], value)]
    taken = torch.cat([rows.flatten() for _, rows in parts])
    if taken.dtype != torch.int64 or not torch.equal(taken.sort()[0], torch.arange(value.shape[0])):
        return list(read(name, value.dequantize()))
    return [(part, value.take_rows(rows.flatten())) for part, rows in parts]


def _stack_parts(
    read: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]], name: str, stack: QuantizedStack
) -> Iterator[tuple[str, Value]]:
    """Each expert's weight under a name of its own."""
    module, _, kind = name.rpartition(".")
    if not module.endswith(".experts"):
        raise ValueError(f"{stack.source}: this is no stack of experts")
    for index, (weight, *others) in enumerate(stack.weights):
        if others or stack.order(index) is not None:
            raise ValueError(f"{stack.source}: an expert's weight must be one matrix")
        yield from _quantized_parts(read, f"{module}.{index}.{kind}.weight", weight)


@dataclass(frozen=True)
class _Owner:
    """The module that has a checkpoint's tensor, and what this must be. No memory: that is freed when packed."""

    module: nn.Module
    name: str
    shape: tuple[int, ...]
    is_floating: bool

    def check(self, name: str, values: Value) -> None:
        """ValueError: `values`, a part of the tensor called `name`, cannot be the module's."""
        if self.shape != tuple(values.shape):
            raise ValueError(f"load_weights: {name} must have shape {self.shape}, got {tuple(values.shape)}")
        if self.is_floating and isinstance(values, Tensor) and not values.is_floating_point():
            raise ValueError(f"load_weights: {name} must have a floating-point dtype, got {values.dtype}")


def same(one: Value, other: Value) -> bool:
    """Whether two weights have the same values."""
    if isinstance(one, QuantizedStack) or isinstance(other, QuantizedStack):
        return one is other
    first, second = (value if isinstance(value, Tensor) else value.dequantize() for value in (one, other))
    return first.shape == second.shape and torch.equal(first, second.to(first))


@dataclass
class _Pending:
    """A module that is packed anew when its missing slots are filled."""

    slots: dict[str, WeightSlot]
    missing: set[str]


class WeightUpdater:
    """Fills the weights of a loaded model anew, tensor by tensor, and packs each layer as soon as it is complete.

    Attributes:
        version: how often weights were given; what was computed with others is out of date.
        packing_version: how often a layer's packed weight went to another place in memory.
        lacking: what else must come before the next step, where the model itself waits for the rest of a merged tensor.
    """

    lacking: str | None = None
    damage: str | None = None
    """The damage that was found in the weights in use, if some was."""

    def __init__(self, model: nn.Module, method: LinearMethod) -> None:
        """`model`: with its weights not packed yet."""
        self.version = self.packing_version = 0
        self._model, self.method = model, method
        self._owners = {
            key: _Owner(module, name, slot.shape, slot.target.is_floating_point())
            for name, module in model.named_modules()
            for key, slot in module_slots(module, name).items()
        }
        self._tied_heads = {
            module.tied_to: module
            for module in model.modules()
            if isinstance(module, ParallelLMHead) and module.tied_to is not None
        }
        # The heads of an update to a model that has none of its own.
        self._heads: dict[str, Value] = {}
        self._pending: dict[nn.Module, _Pending] = {}
        # Modules that got tensors since `complete`.
        self._experts: set[Experts] = set()

    @torch.inference_mode()
    def update(self, weights: Iterable[tuple[str, Value]]) -> set[str]:
        """Take whole tensors (every rank the same, of any dtype and device) by their checkpoint names; returns these.
        All are held until the last one has come: several calls bound the memory. A layer that stacks several tensors,
        such as query, key and value, changes when all of them have come, maybe in several calls, or before the next
        step: those that have not come stay as they are.

        Raises:
            ValueError: a name that the model does not have, a tensor of another shape or kind, or a head that is not
                the embedding's in a model that ties them: none is taken.
        """
        self._heads.clear()
        checked = [(name, self._checked_parts(name, tensor)) for name, tensor in weights]
        self._check_heads({key: values for _, parts in checked for key, values in parts})
        for module in dict.fromkeys(self._owners[key].module for _, parts in checked for key, _ in parts):
            check: Any = getattr(module, "check_update", None)
            if check is not None:
                check()
        for _, parts in checked:
            self.version += 1
            for key, values in parts:
                self._fill(key, values)
        return {name for name, _ in checked}

    def _checked_parts(self, name: str, tensor: Value) -> list[tuple[str, Value]]:
        parts = list(self._owned_parts(name, tensor))
        self._check_stacks(name, tensor, [key for key, _ in parts])
        return parts

    def _owned_parts(self, name: str, tensor: Value) -> Iterator[tuple[str, Value]]:
        for part, values in checkpoint_parts(self._model, name, tensor):
            if part == HEAD and HEAD not in self._owners:
                self._heads[name] = values
                continue
            key = part if part in self._owners else BASE_PREFIX + part
            if key not in self._owners:
                raise ValueError(f"load_weights: the model has no weight {name}")
            self._owners[key].check(name, values)
            yield key, values

    def _check_heads(self, given: dict[str, Value]) -> None:
        """ValueError: a head differs from the embedding that it is tied to, as `given`, or else as the model has it."""
        embedding = next(iter(self._tied_heads), None)
        if embedding is None or not self._heads:
            return
        own = next(key for key, owner in self._owners.items() if owner.module is embedding)
        for name, values in self._heads.items():
            if own in given:
                is_tied = same(given[own], values)
            else:
                is_tied = not isinstance(values, QuantizedStack) and embedding.holds(values)
            if not is_tied:
                raise ValueError(
                    f"load_weights: {name} differs from {own}, but the model ties them: send {own} with it or before "
                    'it, or start with hf_overrides={"tie_word_embeddings": False}'
                )

    def _check_stacks(self, name: str, tensor: Value, keys: list[str]) -> None:
        """ValueError: it is a stack of fewer experts than the layer has."""
        given: dict[Experts, set[str]] = {}
        for key in keys:
            owner = self._owners[key]
            if isinstance(owner.module, Experts):
                index = key.removeprefix(f"{owner.name}.").partition(".")[0]
                given.setdefault(owner.module, set()).add(index)
        for module, indices in given.items():
            is_stack = len(indices) > 1 or len(tensor.shape) > 2
            if is_stack and len(indices) < module.experts.size:
                raise ValueError(
                    f"load_weights: {name} must have {module.experts.size} experts, got {len(indices)} in "
                    f"{tuple(tensor.shape)}"
                )

    def complete(self) -> None:
        """Pack the layers that have got some of their tensors, with the former values of the others.

        Raises:
            ValueError: such a layer is quantised, so that its former values are not known.
            RuntimeError: the weights are damaged.
        """
        # Once a step, in which nothing is pending.
        if self._pending or self._experts or self.lacking is not None or self.damage is not None:
            self._complete()

    @torch.inference_mode()
    def _complete(self) -> None:
        if self.damage is not None:
            raise RuntimeError(self.damage)
        if self.lacking is not None:
            raise ValueError(f"load_weights was given a part of a layer, without {self.lacking}: give all of it")
        for module, pending in list(self._pending.items()):
            if getattr(module, "keeps_values", False):
                self._fill_up(module, pending)
                continue
            given, lacking = set(pending.slots) - pending.missing, pending.missing
            raise ValueError(
                f"load_weights was given {min(given)} without {', '.join(sorted(lacking))}: these make one layer, give "
                "all of them"
            )
        for experts in self._experts:
            experts.restore_lacking()
            if experts.lacking is not None:
                raise ValueError(
                    f"load_weights was given a part of an expert, without {experts.lacking}: give all of it"
                )
        self._experts.clear()

    def _fill(self, key: str, values: Value) -> None:
        owner = self._owners[key]
        module = owner.module
        if isinstance(module, Experts):
            self._fill_expert(module, key.removeprefix(f"{owner.name}."), values)
            return
        pending = self._pending.get(module)
        if pending is None:
            begin = getattr(module, "begin_update", None)
            is_new = begin is not None and begin()
            slots = module_slots(module, owner.name)
            pending = _Pending(slots, set(slots) if is_new else set())
        pending.slots[key].fill(values)
        if pending.missing:
            self._pending[module] = pending
            pending.missing.discard(key)
            if pending.missing:
                return
            del self._pending[module]
            self.packing_version += 1
        self._pack(module)

    def _fill_expert(self, experts: Experts, key: str, values: Value) -> None:
        # It waits for others, while the caller may reuse its memory.
        experts.checkpoint_slots()[key].fill(values.clone() if isinstance(values, Tensor) else values)
        self._experts.add(experts)
        self.packing_version += 1

    def _fill_up(self, module: Any, pending: _Pending) -> None:
        given = {name: slot.target.clone() for name, slot in pending.slots.items() if name not in pending.missing}
        module.restore_values()
        for name, values in given.items():
            pending.slots[name].target.copy_(values)
        del self._pending[module]
        self.packing_version += 1
        self._pack(module)

    def _pack(self, module: nn.Module) -> None:
        packs: Any = self._tied_heads.get(module, module)  # type: ignore[call-overload]
        if hasattr(packs, "process_weights_after_loading"):
            packs.process_weights_after_loading(self.method)
            if not packs.is_plain:
                self.packing_version += 1


class UpdatableModel(nn.Module):
    """A model that takes new weights while it serves. `weight_updater` is set when it is loaded."""

    weight_updater: WeightUpdater

    def load_weights(self, weights: Iterable[tuple[str, Value]]) -> set[str]:
        """See WeightUpdater.update."""
        return self.weight_updater.update(weights)

    def retire(self, successor: Callable[[], Any]) -> None:
        """Free the modules, whoever still holds the model; what it is given to load goes to the model that `successor`
        gives, or raises."""
        self.load_weights = lambda weights: successor().load_weights(weights)  # type: ignore[method-assign]
        self._modules.clear()
        del self.weight_updater


def move_weights(model: nn.Module, device: torch.device) -> None:
    """Move all of a model's tensors, packed ones too, whatever refers to them."""
    for tensor in held_tensors(model):
        tensor.data = tensor.data.to(device)


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """All tensors of a model once, packed ones too."""
    seen: set[int] = set()
    for module in model.modules():
        for tensor in own_tensors(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """A module's tensors, packed ones too, without those of the modules in it."""
    for value in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
        yield from tensors_of(value)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors that an attribute is, or that are in its fields or elements."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in getattr(value, "__dict__", {}).values():
            yield from tensors_of(each)
