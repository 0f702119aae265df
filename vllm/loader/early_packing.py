"""Plain weights of linear layers and heads are packed as soon as they are read, so that they take memory for a moment
only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from vllm.layers.linear import LinearBase
from vllm.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.layers.weight_update import module_slots
from vllm.utils.loading_threads import hand_over


class EarlyPacking:
    """Packs a model's linear layers and heads, each when the last of its tensors is there.

    Attributes:
        packed: the layers whose packing has begun. It ends within `helped`.
    """

    def __init__(self, model: nn.Module, pack: Callable[[nn.Module], None], takes_parts: bool = False) -> None:
        """The linear layers' weights take no memory from here on, until tensors come. `takes_parts`: see
        LinearBase.defer_weight."""
        self.packed: set[nn.Module] = set()
        self._pack = pack
        self._missing: dict[nn.Module, set[str]] = {}
        self._layers: dict[str, nn.Module] = {}
        places = {module: name for name, module in model.named_modules()}
        for name, layer in _alone(model):
            names = set(module_slots(layer, name))
            if isinstance(layer, LinearBase):
                if names:
                    layer.defer_weight(takes_parts)
            elif layer.tied_to is not None:
                names |= module_slots(layer.tied_to, places[layer.tied_to]).keys()
            if names:
                self._missing[layer] = names
                self._layers |= dict.fromkeys(names, layer)

    def filled(self, name: str) -> None:
        """The tensor of that slot is in its place; told once for each."""
        layer = self._layers.get(name)
        if layer is None:
            return
        missing = self._missing[layer]
        missing.discard(name)
        if not missing:
            self.packed.add(layer)
            hand_over(partial(self._pack, layer))


def _alone(model: Any) -> list[tuple[str, LinearBase | ParallelLMHead]]:
    """The linear layers that no module above them packs, or has for itself, and the heads."""
    owned = {
        part
        for module in model.modules()
        if hasattr(module, "process_weights_after_loading")
        for part in module.modules()
        if part is not module
    }
    return [
        (name, module)
        for name, module in model.named_modules()
        if module not in owned
        and ((isinstance(module, LinearBase) and not module.holds_own_weight) or isinstance(module, ParallelLMHead))
    ]
