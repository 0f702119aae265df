"""Parts of a model that another stage has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vllm.layers.absent_modules import Absent
from vllm.layers.sharding import WeightSlot
from vllm.layers.weight_update import module_slots
from vllm.quantization.stored import Value


class _AbsentSlot(WeightSlot):
    """Takes a checkpoint's tensor and keeps nothing."""

    is_elsewhere = True

    def fill(self, value: Value) -> None:
        pass


class AbsentPart(Absent):
    """In place of a module that another stage has: it knows the names of the module's weights, and has none of them.

    Args:
        make: makes the module; it is made without memory.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        with torch.device("meta"):
            super().__init__(make())

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Slots of all of its weights, which may lack."""
        slots: dict[str, WeightSlot] = {}
        for name, module in self.described.named_modules():
            for key, slot in module_slots(module, f"part.{name}" if name else "part").items():
                slots[key.removeprefix("part.")] = _AbsentSlot(slot.target, slot.shards, may_lack=True)
        return slots


def absent_names(model: nn.Module) -> set[str]:
    """The checkpoint names of weights that other stages have."""
    parts = ((name, module) for name, module in model.named_modules() if isinstance(module, AbsentPart))
    return {f"{name}.{key}" for name, part in parts for key in part.checkpoint_slots()}
