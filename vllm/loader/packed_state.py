"""Changes that loading and packing make to a model that was built, as JSON and numbered pieces of bytes.

A model is built anew at every start; what it has then is left out. All else is found by comparison, whatever the layer:
attributes that are others than before, and tensors that a checkpoint fills. What is none of the kinds of values below
cannot be kept, and says so.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.layers import linear_method
from vllm.layers.linear_method import LinearMethod
from vllm.layers.weight_update import module_slots, tensors_of
from vllm.models.transformers import eager

_OWN = frozenset(nn.Module().__dict__)
_ROOMS = ("_parameters", "_buffers", "")
_PLAIN = (type(None), bool, int, float, str)
# Whose classes and functions a stored state may name.
_NAMED = ("vllm.attention.", "vllm.ops.", "vllm.layers.", "vllm.quantization.", "vllm.models.")
# Whose modules may be in a model: others' may keep what is not seen here.
_KNOWN = ("vllm.", "torch.", "transformers.")
_UNKNOWN = ("vllm.upstream.",)


class NotStorableError(ValueError):
    """A model has something that cannot be kept on disk."""


class Change(NamedTuple):
    """An attribute that differs: of the module `name`, in its parameters, its buffers or, "", its own attributes."""

    name: str
    room: str
    attribute: str
    value: Any
    is_removed: bool = False


@dataclass
class _Mark:
    """Tells whether an attribute is the one that it was, without keeping its tensors in memory."""

    value: Any  # None where there are tensors
    tensors: list[weakref.ref[Tensor]]
    is_filled: bool  # a checkpoint's tensors are written into it

    def fits(self, value: Any) -> bool:
        if self.is_filled:
            return False
        now = list(tensors_of(value))
        if now or self.tensors:
            return len(now) == len(self.tensors) and all(
                ref() is tensor for ref, tensor in zip(self.tensors, now, strict=True)
            )
        return value is self.value or (
            type(value) is type(self.value) and type(value) in _PLAIN and value == self.value
        )


class BuiltState:
    """A model as it was built, before its weights are loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        filled = {
            slot.target.untyped_storage().data_ptr()
            for name, module in model.named_modules()
            for slot in module_slots(module, name).values()
        } - {0}
        self._modules = {name: id(module) for name, module in model.named_modules()}
        self._marks = {key: _mark(value, filled) for key, value in _attributes(model)}

    def changes(self) -> Iterator[Change]:
        """The attributes that differ now. NotStorableError: modules were added, removed or of unknown classes."""
        for name, module in self._model.named_modules():
            where = f"{type(module).__module__}."
            if not where.startswith(_KNOWN) or where.startswith(_UNKNOWN):
                raise NotStorableError(f"{name} is of the class {where}{type(module).__qualname__}, not one of ours")
        if {name: id(module) for name, module in self._model.named_modules()} != self._modules:
            raise NotStorableError("loading changed the model's modules")
        now = dict(_attributes(self._model))
        for key, value in now.items():
            mark = self._marks.get(key)
            if mark is None or not mark.fits(value):
                yield Change(key[0], key[1], key[2], value)
        for key in self._marks.keys() - now.keys():
            yield Change(key[0], key[1], key[2], None, True)


def _mark(value: Any, filled: set[int]) -> _Mark:
    tensors = list(tensors_of(value))
    is_filled = any(tensor.untyped_storage().data_ptr() in filled for tensor in tensors)
    return _Mark(None if tensors else value, [weakref.ref(tensor) for tensor in tensors], is_filled)


def _attributes(model: nn.Module) -> Iterator[tuple[tuple[str, str, str], Any]]:
    for name, module in model.named_modules():
        for room in _ROOMS:
            for attribute, value in _room(module, room).items():
                if room or attribute not in _OWN:
                    yield (name, room, attribute), value


def _room(module: nn.Module, room: str) -> dict[str, Any]:
    return module.__dict__[room] if room else module.__dict__


def encode(changes: Iterator[Change], number: Callable[[Tensor], int]) -> list[Any]:
    """The changes as JSON. `number` takes a tensor over: the number of the piece that has `dense_bytes` of it.
    NotStorableError: a value is of no kind that can be kept."""
    encoder = _Encoder(number)
    found: list[Any] = []
    for change in changes:
        try:
            value = None if change.is_removed else encoder.encode(change.value)
        except NotStorableError as error:
            raise NotStorableError(f"{change.name}.{change.attribute}: {error}") from None
        found.append([change.name, change.room, change.attribute, value, change.is_removed])
    return found


def decode(stored: list[Any], piece: Callable[[int], Tensor]) -> list[Change]:
    """`encode` undone; `piece` gives the uint8 [n] of a number. ValueError and its like: it was not written by this
    code."""
    decoder = _Decoder(piece)
    return [
        Change(name, room, attribute, decoder.decode(value), is_removed)
        for name, room, attribute, value, is_removed in stored
    ]


def apply(model: nn.Module, changes: list[Change]) -> None:
    """Make the changes to a model that was built. KeyError, before any is made: it lacks a module."""
    modules = dict(model.named_modules())
    places = [(modules[change.name], change) for change in changes]
    for module, change in places:
        room = _room(module, change.room)
        if change.is_removed:
            room.pop(change.attribute, None)
        else:
            room[change.attribute] = change.value


def layout(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor's values in the order that they have in memory, contiguous and each once, and the strides that make
    the tensor of them."""
    once = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    steps = once.stride()
    order = sorted(range(once.dim()), key=lambda dim: -steps[dim])
    dense = once.permute(order).contiguous()
    strides = dict(zip(order, dense.stride(), strict=True))
    return dense, tuple(strides[dim] if once.shape[dim] == tensor.shape[dim] else 0 for dim in range(once.dim()))


def over(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The tensor of the bytes `data`, uint8 [n]."""
    return data.view(dtype).as_strided(shape, strides) if data.numel() else torch.empty(shape, dtype=dtype)


def _named(value: Any) -> str | None:
    """Where a class or function of ours is found."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if module.startswith(_NAMED) and getattr(importlib.import_module(module), name, None) is value:
        return f"{module}:{name}"
    return None


def _found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module.startswith(_NAMED):
        raise ValueError(f"a stored state must not name {name}")
    return getattr(importlib.import_module(module), attribute)


class _Encoder:
    """Values as JSON: plain ones are themselves, all others a pair of a letter and their parts."""

    def __init__(self, number: Callable[[Tensor], int]) -> None:
        self._number = number

    def encode(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            kind = {list: "l", tuple: "t", torch.Size: "s"}.get(type(value))
            if kind is not None:
                return [kind, *map(self.encode, value)]
        if type(value) is dict:
            return ["d", *([self.encode(key), self.encode(each)] for key, each in value.items())]
        if isinstance(value, range):
            return ["r", value.start, value.stop, value.step]
        if isinstance(value, torch.dtype):
            return ["y", str(value).removeprefix("torch.")]
        if value is get_tp_group():
            return ["g"]
        if isinstance(value, LinearMethod):
            for module in (linear_method, eager):
                for name, known in vars(module).items():
                    if known is value:
                        return ["f", f"{module.__name__}:{name}"]
        elif is_dataclass(value) and not isinstance(value, type) and (own := _named(type(value))):
            return ["c", own, {each: self.encode(getattr(value, each)) for each in _kept_fields(value)}]
        elif callable(value) and (own := _named(value)):
            return ["f", own]
        raise NotStorableError(f"a {type(value).__qualname__} cannot be kept on disk")

    def _tensor(self, value: Tensor) -> Any:
        if value.device.type != "cpu":
            raise NotStorableError(f"a tensor is on {value.device}")
        _, strides = layout(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return ["v", self._number(value), dtype, list(value.shape), list(strides), isinstance(value, nn.Parameter)]


def _kept_fields(value: Any) -> list[str]:
    return [each.name for each in fields(value) if not each.metadata.get("renewed")]


class _Decoder:
    def __init__(self, piece: Callable[[int], Tensor]) -> None:
        self._piece = piece
        self._tensors: dict[str, Tensor] = {}

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *parts = value
        if kind == "v":
            return self._tensor(*parts)
        if kind == "c":
            return self._instance(*parts)
        if kind == "f":
            return _found(parts[0])
        if kind == "d":
            return {self.decode(key): self.decode(each) for key, each in parts}
        if kind == "g":
            return get_tp_group()
        if kind == "y":
            return getattr(torch, parts[0])
        if kind == "r":
            return range(*parts)
        make: Any = {"l": list, "t": tuple, "s": torch.Size}[kind]
        return make(map(self.decode, parts))

    def _tensor(self, number: int, dtype: str, shape: list[int], strides: list[int], is_parameter: bool) -> Tensor:
        key = f"{number} {dtype} {shape} {strides} {is_parameter}"
        if key not in self._tensors:
            tensor = over(self._piece(number), getattr(torch, dtype), tuple(shape), tuple(strides))
            self._tensors[key] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        return self._tensors[key]

    def _instance(self, name: str, parts: dict[str, Any]) -> Any:
        made = _found(name)(**{each: self.decode(value) for each, value in parts.items()})
        if hasattr(made, "renew"):
            made.renew()
        return made
