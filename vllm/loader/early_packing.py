"""Plain weights of linear layers are packed as soon as they are read, so that they take memory for a moment only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from vllm.layers.linear import LinearBase
from vllm.layers.weight_update import module_slots
from vllm.utils.loading_threads import hand_over


class EarlyPacking:
    """Packs a model's linear layers, each when the last of its tensors is there.

    Attributes:
        packed: the layers whose packing has begun. It ends within `helped`.
    """

    def __init__(self, model: nn.Module, pack: Callable[[nn.Module], None]) -> None:
        """The layers' weights take no memory from here on, until tensors come."""
        self.packed: set[nn.Module] = set()
        self._pack = pack
        self._missing: dict[nn.Module, set[str]] = {}
        self._layers: dict[str, nn.Module] = {}
        for name, layer in _alone(model):
            names = set(module_slots(layer, name))
            if names:
                layer.defer_weight()
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


def _alone(model: Any) -> list[tuple[str, LinearBase]]:
    """The linear layers that no module above them packs, or has for itself."""
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
        if isinstance(module, LinearBase) and module not in owned and not module.holds_own_weight
    ]
