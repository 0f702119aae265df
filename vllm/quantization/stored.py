"""From a checkpoint's tensors to quantised weights: common to all formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.ops.packing import refuse_unless_finite
from vllm.ops.quantized_tensor import is_finite
from vllm.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.quantization.weight import QuantizedStack, QuantizedWeight
from vllm.utils.host_memory import is_out_of_memory
from vllm.utils.loading_threads import side_by_side

# Names of tensors that follow their module's without a dot.
_CONTINUING = ("_blocks", "_scales")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

Value = Tensor | QuantizedWeight | QuantizedStack


@dataclass
class StoredTensors:
    """The tensors of one module, by their names within it.

    Attributes:
        where: the file that holds them, for errors.
        module: the checkpoint's name of the module.
        taken: names of the tensors that the weight was made of.
    """

    where: str
    module: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(
        self, name: str, dtypes: torch.dtype | tuple[torch.dtype, ...], *shape: int | None, reason: str = ""
    ) -> Tensor:
        """The tensor `name`, of one of `dtypes` and of `shape` (None: any size) for `reason`. ValueError: it is
        another one."""
        tensor = self.tensors[name]
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
        if tensor.dtype not in allowed:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise self.error(name, f"has dtype {str(tensor.dtype).removeprefix('torch.')}, expected {names}")
        fits = len(shape) == tensor.dim() and all(
            size in (None, own) for size, own in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.error(name, f"has shape {tuple(tensor.shape)}, expected ({wanted}){reason}")
        self.taken.add(name)
        return tensor

    def scalar(self, name: str, dtypes: torch.dtype | tuple[torch.dtype, ...] = FLOATS) -> Tensor:
        """The one value of the tensor `name`, float32 []. ValueError: it has several."""
        tensor = self.tensors[name]
        if tensor.numel() != 1:
            raise self.error(name, f"has shape {tuple(tensor.shape)}, expected one value")
        return self.take(name, dtypes, *tensor.shape).float().reshape(())

    def error(self, name: str, problem: str) -> ValueError:
        """The error for a tensor that cannot be used."""
        return ValueError(f"{self.where}: {self.name_of(name)} {problem}")

    def name_of(self, name: str) -> str:
        """The checkpoint's name of the tensor `name`."""
        return _join(self.module, name)


_Read = Callable[[StoredTensors], Value]


@dataclass(frozen=True)
class WeightFormat:
    """How a module's weight is stored.

    Attributes:
        required, optional: names of its tensors within the module.
        read: the weight that they are. ValueError: they are not what the format says.

    The weight of a module whose tensors' names continue its own is called as the module.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: _Read


class StoredMethod(QuantizeMethodBase):
    """The method of layers whose weight comes quantised from the checkpoint: the loader fills them."""

    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Nothing: a layer takes its packed weight when it is loaded."""

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output."""
        return layer.forward(*args, **kwargs)


class StoredConfig(QuantizationConfig):
    """The settings of a format of checkpoints.

    Attributes:
        name: its value of `quantization` and of `quant_method`; its file in `formats/` is called so.
        files: those of a model folder that may hold the settings when config.json does not.
        settings: names of settings that are read, and of those that say how the checkpoint was made or how other
            programs run it; of the others a warning says that they have no effect. None: there is no warning.
        names: of tensors within modules that only quantised modules have.
        shared_names: of such that quantised modules may have, and others, too.
        may_be_plain: whether a checkpoint may have no quantised module.
        is_read_in_place: whether reading a weight takes little time, as its codes stay where they are.
    """

    name: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[str | None] = None
    names: tuple[str, ...]
    shared_names: tuple[str, ...] = ()
    may_be_plain: bool = False
    is_read_in_place: bool = False

    def __init__(self, config: dict[str, Any]) -> None:
        """ValueError: settings that cannot be honoured."""
        super().__init__()

    def get_name(self) -> str:
        return self.name

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> StoredConfig:
        return cls(config)

    @staticmethod
    def wrote(settings: dict[str, Any]) -> bool:
        """Whether `settings` without a `quant_method` are this format's: some programs leave it out."""
        return False

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(FLOATS)

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return list(cls.files)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return StoredMethod()

    def unstacked(
        self, tensors: Iterable[tuple[str, Tensor]], files: Mapping[str, str]
    ) -> tuple[Iterable[tuple[str, Tensor]], Mapping[str, str]]:
        """A checkpoint's tensors, and the file that each is in, with tensors of several modules in their parts."""
        return tensors, files

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        """How the weight of a checkpoint's `module` is stored, of which `stored` are names of tensors. ValueError: it
        should not be quantised, or not so."""
        raise NotImplementedError


def read_quantized(
    tensors: Iterable[tuple[str, Tensor]], files: Mapping[str, str], config: StoredConfig
) -> Iterator[tuple[str, Value]]:
    """A checkpoint's tensors, with those of each quantised module as one: its `weight` (see WeightFormat).

    Args:
        files: by the names of all tensors, the file that each is in, for errors.

    Raises:
        ValueError: a module lacks a tensor, or one is not what the format says.
    """
    tensors, files = config.unstacked(tensors, files)
    expected = _quantized_modules(files, config)
    if not expected and not config.may_be_plain:
        raise ValueError(
            f"{', '.join(sorted(set(files.values())))} has no quantised weight, but its quantization_config is of "
            f"method {config.get_name()!r}, whose weights have tensors {', '.join(config.names[:3])}"
        )
    calls = _weights(tensors, files, config, expected)
    yield from (call() for call in calls) if config.is_read_in_place else side_by_side(calls)


def _weights(
    tensors: Iterable[tuple[str, Tensor]],
    files: Mapping[str, str],
    config: StoredConfig,
    expected: dict[str, tuple[_Read, set[str]]],
) -> Iterator[Callable[[], tuple[str, Value]]]:
    """Functions that make the results of read_quantized."""
    pending: dict[str, StoredTensors] = {}
    for name, tensor in tensors:
        module, own = _split(name, config)
        read, wanted = expected.get(module, (None, set()))
        if read is None or own not in wanted:
            if own == "weight" and (not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1):
                raise ValueError(f"{files[name]}: {name} has dtype {tensor.dtype}, but no scales beside it")
            yield partial(_named, name, tensor)
            continue
        stored = pending.setdefault(module, StoredTensors(files[name], module))
        stored.tensors[own] = tensor
        if len(stored.tensors) == len(wanted):
            del pending[module]
            yield partial(_read, module if own in _CONTINUING else f"{module}.weight", read, stored)


def _named(name: str, tensor: Tensor) -> tuple[str, Value]:
    return name, tensor


def _read(name: str, read: _Read, stored: StoredTensors) -> tuple[str, Value]:
    try:
        value = read(stored)
    except (IndexError, RuntimeError, ValueError) as error:
        if is_out_of_memory(error) or str(error).startswith(f"{stored.where}: "):
            raise
        raise ValueError(f"{stored.where}: the tensors of {stored.module} do not fit each other: {error}") from error
    if isinstance(value, Tensor):
        return name, value
    weights = [value] if isinstance(value, QuantizedWeight) else [part for rows in value.weights for part in rows]
    for own in () if weights[0].tensor.is_plain else sorted(stored.taken):
        if not is_finite(stored.tensors[own]):
            raise stored.error(own, "has a value that is NaN or infinite")
    for weight in weights:
        refuse_unless_finite(weight.tensor, partial(_not_finite, stored.where, weight.source))
    return name, value


def _not_finite(where: str, source: str) -> ValueError:
    return ValueError(f"{where}: {source} has a scale, offset or table value that is NaN or infinite")


def _split(name: str, config: StoredConfig) -> tuple[str, str]:
    """A tensor's module, and its name there."""
    for own in sorted((*config.names, *config.shared_names), key=len, reverse=True):
        suffix = _join("", own)
        if name.endswith(suffix):
            return name.removesuffix(suffix), own
    module, _, own = name.rpartition(".")
    return module, own


def _join(module: str, own: str) -> str:
    return module + own if own in _CONTINUING else f"{module}.{own}"


def _quantized_modules(files: Mapping[str, str], config: StoredConfig) -> dict[str, tuple[_Read, set[str]]]:
    """By module, how its weight is read, and the names of the tensors that this takes."""
    modules: dict[str, set[str]] = {}
    where: dict[str, str] = {}
    for name, file in files.items():
        module, own = _split(name, config)
        modules.setdefault(module, set()).add(own)
        where[module] = file
    found = {}
    for module, stored in modules.items():
        if stored.isdisjoint(config.names):
            continue
        try:
            form = config.weight_format(module, stored)
        except ValueError as error:
            raise ValueError(f"{where[module]}: {module}: {error}") from None
        lacking = [own for own in form.required if own not in stored]
        if lacking:
            has = ", ".join(sorted(stored & {*config.names, *config.shared_names}))
            raise ValueError(
                f"{where[module]} lacks {', '.join(_join(module, own) for own in lacking)}: a weight of method "
                f"{config.get_name()!r} has {', '.join(form.required)}, this one has {has}"
            )
        found[module] = form.read, stored & {*form.required, *form.optional}
    return found
