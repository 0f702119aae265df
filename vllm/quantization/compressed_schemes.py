"""The schemes of a compressed-tensors configuration, and which modules have them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vllm.quantization.activations import InputQuantization
from vllm.quantization.setting_values import read_flag, read_names
from vllm.quantization.stored import FLOATS, StoredTensors

# By format, the type of its codes and their bits.
_BITS: dict[str, tuple[str, tuple[int, ...]]] = {
    "pack-quantized": ("int", (2, 3, 4, 5, 6, 8)),
    "int-quantized": ("int", (2, 3, 4, 5, 6, 7, 8)),
    "float-quantized": ("float", (8,)),
    "nvfp4-pack-quantized": ("float", (4,)),
    "mxfp4-pack-quantized": ("float", (4,)),
    "mxfp8-quantized": ("float", (8,)),
}
# The order in which inputs were quantised; "weight" and "static" keep their groups.
_ORDERS = (None, False, True, "group", "dynamic", "weight", "static")
# A checkpoint's quantised modules are of this class.
_CLASSES = ("Linear", "LinearBase")


@dataclass(frozen=True)
class Scheme:
    """How the weights of a group of modules are stored, and what is done to their inputs.

    Attributes:
        format: a key of _BITS.
        bits: of a code.
        symmetric: there are no zero points.
        group_size: inputs with one scale; None: all of a row.
        block: rows and columns with one scale; None: there are no blocks.
        reorders: the inputs of a group may be anywhere.
        activations: what is done to inputs, without a checkpoint's scales; None: nothing.
        is_static: those scales are in the checkpoint.
    """

    format: str
    bits: int
    symmetric: bool
    group_size: int | None
    block: tuple[int, int] | None
    reorders: bool
    activations: InputQuantization | None
    is_static: bool

    @property
    def input_names(self) -> tuple[str, ...]:
        """The tensors that a module must have for its inputs."""
        if self.activations is None:
            return ()
        if self.activations.kind == "fp4":
            return ("input_global_scale",)
        if not self.is_static:
            return ()
        return ("input_scale",) if self.activations.symmetric else ("input_scale", "input_zero_point")

    def inputs(self, stored: StoredTensors) -> InputQuantization | None:
        """Rounding of a module's inputs."""
        if self.activations is None or not self.input_names:
            return self.activations
        if self.activations.kind == "fp4":
            return self.activations.with_global_scale(float(stored.scalar("input_global_scale")))
        zero = 0.0
        if not self.activations.symmetric:
            zero = float(stored.scalar("input_zero_point", (torch.int8, *FLOATS)))
        return self.activations.with_scale(float(stored.scalar("input_scale")), zero)


class Schemes:
    """The schemes of all modules."""

    def __init__(self, groups: list[tuple[list[str], Scheme]], ignored: list[str]) -> None:
        self._groups, self._ignored = groups, ignored

    def of(self, module: str) -> Scheme | None:
        """The scheme of a checkpoint's `module`; None: it has none. Exact names go before patterns, and these before
        names of classes."""
        if any(_matches(module, target) for target in self._ignored):
            return None
        matching = [
            (_rank(target), scheme)
            for targets, scheme in self._groups
            for target in targets
            if _matches(module, target)
        ]
        return min(matching, key=lambda each: each[0])[1] if matching else None


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, *_CLASSES)


def _rank(target: str) -> int:
    return 2 if target in _CLASSES else 1 if target.startswith("re:") else 0


def parse_schemes(config: dict[str, Any], rounds_inputs: bool) -> Schemes:
    """The schemes in the content of a quantization_config, of which input_activations count only with `rounds_inputs`.
    ValueError names what is not implemented."""
    for name, meaning in _REFUSED.items():
        value = config.get(name)
        if value and not (isinstance(value, dict) and value.get("format", "dense") == "dense"):
            raise ValueError(f"{name} is not implemented, got {value!r}: {meaning}")
    _check_kv_cache(config.get("kv_cache_scheme"))
    groups = config.get("config_groups")
    if not groups and config.get("kv_cache_scheme"):
        return Schemes([], [])
    if not isinstance(groups, dict) or not groups:
        raise ValueError("config_groups must name at least one group")
    found = []
    for name, group in groups.items():
        try:
            if not isinstance(group, dict):
                raise ValueError(f"must be an object with targets and weights, got {group!r}")
            found.append((read_names(group, "targets"), _scheme(group, config.get("format"), rounds_inputs)))
        except ValueError as error:
            raise ValueError(f"config_groups: {name}: {error}") from None
    return Schemes(found, read_names(config, "ignore"))


_REFUSED = {"sparsity_config": "weights must be dense"}


def _check_kv_cache(scheme: dict[str, Any] | None) -> None:
    """Its scales are the checkpoint's, and used where kv_cache_dtype asks for 8 bits."""
    if scheme and not isinstance(scheme, dict):
        raise ValueError(f"kv_cache_scheme must be an object, got {scheme!r}")
    usual = {"type": "int", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    for name, value in ((usual | {"type": "float"}) if scheme else {}).items():
        given = (scheme or {}).get(name, usual[name])
        if given != value:
            raise ValueError(f"kv_cache_scheme is not implemented with {name}={given!r}, only with {value!r}")


def _scheme(group: dict[str, Any], usual_format: str | None, rounds_inputs: bool) -> Scheme:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ValueError("weights must say how they are quantised; groups of activations alone are not implemented")
    if group.get("output_activations"):
        raise ValueError("output_activations are not implemented")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    name = group.get("format") or usual_format
    if name is None or name in ("naive-quantized", "mixed-precision"):
        name = "float-quantized" if kind == "float" else "int-quantized"
    if not isinstance(name, str) or name not in _BITS:
        raise ValueError(f"format must be one of {', '.join(_BITS)}, got {name!r}")
    if bits not in _BITS[name][1] or kind != _BITS[name][0]:
        raise ValueError(f"weights of format {name} cannot be of type {kind!r} with num_bits={bits!r}")
    if weights.get("dynamic"):
        raise ValueError("weights must not be dynamic")
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    block = _block(weights.get("block_structure"))
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        raise ValueError(f"weights' strategy must be tensor, channel, group or block, got {strategy!r}")
    if strategy == "block" and block is None:
        raise ValueError("weights' block_structure must be two sizes, got None")
    group_size = weights.get("group_size") if strategy in ("group", "tensor_group") else None
    if strategy == "group" and (not isinstance(group_size, int) or group_size < 1):
        raise ValueError(f"weights' group_size must be at least 1, got {group_size!r}")
    order = weights.get("actorder")
    if order not in _ORDERS:
        raise ValueError(f"weights' actorder must be one of {', '.join(map(repr, _ORDERS))}, got {order!r}")
    activations, is_static = parse_activations(group.get("input_activations") if rounds_inputs else None)
    return Scheme(
        name,
        bits,
        read_flag(weights, "symmetric", True),
        group_size,
        block if strategy == "block" else None,
        order in ("group", "dynamic", True),
        activations,
        is_static,
    )


def _block(value: Any) -> tuple[int, int] | None:
    """Two sizes, as a list or as "128x128"; None: there are none."""
    sizes = value.split("x") if isinstance(value, str) else value
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(str(size).isdecimal() and int(size) for size in sizes):
        raise ValueError(f"weights' block_structure must be two sizes, got {value!r}")
    return int(sizes[0]), int(sizes[1])


_INPUT_KINDS: dict[tuple[str, int], Literal["int8", "fp8", "fp4"]] = {
    ("int", 8): "int8",
    ("float", 8): "fp8",
    ("float", 4): "fp4",
}


def parse_activations(scheme: dict[str, Any] | None) -> tuple[InputQuantization | None, bool]:
    """The treatment that a group's input_activations name, and whether with the checkpoint's scales. ValueError: not
    implemented."""
    if not scheme:
        return None, False
    kind = _INPUT_KINDS.get((scheme.get("type", "int"), scheme.get("num_bits", 8)))
    strategy, dynamic = scheme.get("strategy") or "tensor", scheme.get("dynamic", False)
    size = scheme.get("group_size") if strategy in ("group", "tensor_group") else None
    # fp4 has scales in fp8 times one of the checkpoint's, and the others their own.
    is_known = (kind == "fp4") == (strategy == "tensor_group") and strategy in (
        "tensor",
        "token",
        "group",
        "tensor_group",
    )
    is_mx = kind == "fp8" and size == 32 and scheme.get("scale_dtype") == "torch.uint8"
    if kind is None or not is_known or is_mx or (size is not None and not dynamic):
        raise ValueError(
            "input_activations must be 8-bit integers or floats by token, tensor or dynamic group, or fp4 by "
            f"tensor_group; got {scheme}"
        )
    return InputQuantization(kind, size, bool(scheme.get("symmetric", True))), not dynamic
