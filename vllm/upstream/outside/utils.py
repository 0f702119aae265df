"""Helpers by which upstream's models are put together and loaded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vllm.upstream.engine import IntermediateTensors
from vllm.upstream.outside.weights import default_weight_loader

Weights = Iterable[tuple[str, Tensor]]
_Renames = Mapping[str, str | None]


def maybe_prefix(prefix: str, name: str) -> str:
    """`name` within a module called `prefix`."""
    return f"{prefix}.{name}" if prefix else name


def make_layers(
    num_hidden_layers: int, layer_fn: Callable[..., nn.Module], prefix: str
) -> tuple[int, int, nn.ModuleList]:
    """(0, their number, the layers), each made by layer_fn(prefix=its name)."""
    layers = nn.ModuleList(layer_fn(prefix=f"{prefix}.{index}") for index in range(num_hidden_layers))
    return 0, num_hidden_layers, layers


def make_empty_intermediate_tensors_factory(keys: list[str], hidden_size: int) -> Callable[..., IntermediateTensors]:
    """A function of (batch_size, dtype, device) to zeros [batch_size, hidden_size] by each key."""

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        return IntermediateTensors(
            {key: torch.zeros(batch_size, hidden_size, dtype=dtype, device=device) for key in keys}
        )

    return make


class PPMissingLayer(nn.Identity):
    """A layer of another stage of a pipeline; there is one stage, which has all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        return args[0] if args else next(iter(kwargs.values()))


def is_pp_missing_parameter(name: str, model: nn.Module) -> bool:
    """Whether another stage has it: False, unless a layer says so itself."""
    missing = (each for each, module in model.named_modules() if isinstance(module, PPMissingLayer))
    return any(name == each or name.startswith(f"{each}.") for each in missing)


def get_pp_missing_layer_names(model: nn.Module) -> list[str]:
    """The layers of other stages, each with a dot behind it."""
    return [f"{name}." for name, module in model.named_modules() if isinstance(module, PPMissingLayer)]


def extract_layer_index(layer_name: str, num_attn_module: int = 1) -> int:
    """The number in a layer's name. ValueError: it has none, or several."""
    numbers = [int(part) for part in layer_name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(f"a layer's name must have one number, got {layer_name!r}")
    return numbers[0]


def cast_overflow_tensors(tensors: Tensor, offset: float = 1000) -> Tensor:
    """Infinite and NaN values as large ones of the dtype."""
    if not (tensors.isinf().any() or tensors.isnan().any()):
        return tensors
    bound = torch.finfo(tensors.dtype).max - offset
    return tensors.clamp(-bound, bound)


def init_vllm_registered_model(
    vllm_config: Any, *, prefix: str = "", hf_config: Any = None, architectures: list[str] | None = None
) -> nn.Module:
    """A model within a model, by its architecture: one that was written for upstream, too.

    Raises:
        ValueError: there is none from outside the tree by this name.
    """
    from vllm.models.registry import ModelRegistry
    from vllm.upstream.engine_parts import resolve_model_cls

    if hf_config is not None:
        vllm_config = vllm_config.with_hf_config(hf_config, architectures)
    names = architectures or vllm_config.model_config.hf_config.architectures
    model_class, name = resolve_model_cls(ModelRegistry, names)
    if model_class.__module__.startswith("vllm.models."):
        raise ValueError(f"{name} is a model of the engine's own: it cannot be a part of a model from outside the tree")
    build: Any = model_class
    return build(vllm_config=vllm_config, prefix=prefix)


@dataclass
class WeightsMapper:
    """Renames a checkpoint's tensors: first by regular expressions, then what a name has in it, begins with and ends
    with. None in place of a new name drops the tensor."""

    orig_to_new_regex: Mapping[re.Pattern[str], str | None] = field(default_factory=dict)
    orig_to_new_substr: _Renames = field(default_factory=dict)
    orig_to_new_prefix: _Renames = field(default_factory=dict)
    orig_to_new_suffix: _Renames = field(default_factory=dict)
    orig_to_new_stacked: Mapping[str, tuple[str, Any]] = field(default_factory=dict)

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        """Both; where they differ, `other`."""
        return WeightsMapper(*({**vars(self)[name], **vars(other)[name]} for name in vars(self)))

    def _map_name(self, key: str) -> str | None:
        for pattern, new in self.orig_to_new_regex.items():
            if re.search(pattern, key):
                if new is None:
                    return None
                key = re.sub(pattern, new, key)
        for old, new in self.orig_to_new_substr.items():
            if old in key:
                if new is None:
                    return None
                key = key.replace(old, new, 1)
        for old, new in self.orig_to_new_prefix.items():
            if key.startswith(old):
                if new is None:
                    return None
                key = new + key.removeprefix(old)
        for old, new in self.orig_to_new_suffix.items():
            if key.endswith(old):
                if new is None:
                    return None
                key = key.removesuffix(old) + new
        return key

    def apply(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are kept, renamed."""
        for name, tensor in weights:
            if (new := self._map_name(name)) is not None:
                yield new, tensor

    def apply_list(self, values: list[str]) -> list[str]:
        """The names that are kept, renamed."""
        return [new for name in values if (new := self._map_name(name)) is not None]

    def apply_dict(self, values: dict[str, Any]) -> dict[str, Any]:
        """The entries that are kept, renamed."""
        return {new: value for name, value in values.items() if (new := self._map_name(name)) is not None}


class AutoWeightsLoader:
    """Gives a module's children the tensors whose names begin with theirs: by their `load_weights`, where they have
    one, else parameter by parameter.

    Args:
        module: whose tensors come.
        skip_prefixes, skip_substrs: tensors to leave out, by what their names begin with or have in them.
        ignore_unexpected_prefixes, ignore_unexpected_suffixes: tensors that the module may lack.
    """

    ROTARY_EMBEDS_UNUSED_WEIGHTS = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached",
                                    "rotary_emb.sin_cached")  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        *,
        skip_prefixes: list[str] | None = None,
        skip_substrs: list[str] | None = None,
        ignore_unexpected_prefixes: list[str] | None = None,
        ignore_unexpected_suffixes: list[str] | None = None,
    ) -> None:
        self.module = module
        self.skip_prefixes = list(skip_prefixes or ())
        self.skip_substrs = [*(skip_substrs or ()), *self.ROTARY_EMBEDS_UNUSED_WEIGHTS]
        self.ignore_unexpected_prefixes = list(ignore_unexpected_prefixes or ())
        self.ignore_unexpected_suffixes = list(ignore_unexpected_suffixes or ())

    def load_weights(self, weights: Weights, *, mapper: WeightsMapper | None = None) -> set[str]:
        """Load all; returns the names of the parameters that were filled.

        Raises:
            ValueError: a tensor that the module does not have, or one of another shape.
        """
        if mapper is not None:
            weights = mapper.apply(weights)
        kept = ((name, tensor) for name, tensor in weights if not self._is_skipped(name))
        return set(self._load("", self.module, kept))

    def _is_skipped(self, name: str) -> bool:
        return name.startswith(tuple(self.skip_prefixes)) or any(part in name for part in self.skip_substrs)

    def _may_lack(self, name: str) -> bool:
        return name.startswith(tuple(self.ignore_unexpected_prefixes)) or name.endswith(
            tuple(self.ignore_unexpected_suffixes)
        )

    def _load(self, prefix: str, module: nn.Module, weights: Weights) -> Iterator[str]:
        if isinstance(module, PPMissingLayer):
            return
        own = getattr(module, "load_weights", None)
        if module is not self.module and callable(own):
            loaded = own(weights)
            yield from (maybe_prefix(prefix, name) for name in loaded or ())
            return
        children, parameters = dict(module.named_children()), _own_tensors(module)
        split = ((*name.partition(".")[::2], tensor) for name, tensor in weights)
        for first, group in itertools.groupby(split, key=lambda part: part[0]):
            name, rest = maybe_prefix(prefix, first), ((after, tensor) for _, after, tensor in group)
            if first in children:
                yield from self._load(name, children[first], rest)
            elif first in parameters:
                yield from self._fill(name, parameters[first], rest)
            else:
                for after, _ in rest:
                    self._refuse(maybe_prefix(name, after) if after else name)

    def _fill(self, name: str, parameter: Tensor, weights: Weights) -> Iterator[str]:
        for after, tensor in weights:
            if after:
                self._refuse(f"{name}.{after}")
                continue
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor)
            yield name

    def _refuse(self, name: str) -> None:
        if not self._may_lack(name):
            raise ValueError(f"{type(self.module).__name__} has no parameter or module {name}")


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the buffers that checkpoints have."""
    kept = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer is not None}
    return {**kept, **dict(module.named_parameters(recurse=False))}
