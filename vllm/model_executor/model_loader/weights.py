"""Fills a model's parameters from a checkpoint, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vllm.model_executor.layers.sharding import WeightSlot
from vllm.model_executor.layers.weight_update import BASE_PREFIX, HEAD, IGNORED_SUFFIX, module_slots
from vllm.model_executor.model_loader.progress import progress_bar
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors, shard_files

_NUM_NAMED = 5


def checkpoint_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Where each tensor of a checkpoint goes, by its Hugging Face name."""
    return {key: slot for name, module in model.named_modules() for key, slot in module_slots(module, name).items()}


def load_weights(model: nn.Module, folder: Path, use_tqdm: bool = False) -> None:
    """Copy this rank's part of every tensor of the folder's safetensors into the model, converting to the parameters'
    dtype.

    Raises:
        ValueError: a weight that is missing, unexpected, or of another shape; the message names it.
    """
    slots = checkpoint_slots(model)
    expected = len(slots)
    tied = HEAD not in slots
    unexpected: list[str] = []
    with progress_bar("Loading weights", expected, use_tqdm) as bar:
        for name, tensor in iterate_tensors(shard_files(folder)):
            if name.endswith(IGNORED_SUFFIX) or (tied and name == HEAD):
                continue
            key = name if name in slots else BASE_PREFIX + name
            slot = slots.pop(key, None)
            if slot is None:
                unexpected.append(name)
                continue
            if slot.shape != tuple(tensor.shape):
                raise ValueError(
                    f"{folder.name}: weight {name} has shape {tuple(tensor.shape)}, but config.json means {slot.shape}"
                )
            slot.fill(tensor)
            bar.update()
    _refuse(folder, "lacks", list(slots))
    _refuse(folder, "has unexpected", unexpected)


def _refuse(folder: Path, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        raise ValueError(f"{folder.name} {verb} weights: {', '.join(names[:_NUM_NAMED])}{more}")
