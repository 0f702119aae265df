"""Fills a model's parameters from a checkpoint, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.sharding import Shard, WeightSlot
from vllm.model_executor.model_loader.progress import progress_bar
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors, shard_files

# Checkpoints saved from the model without its head lack this prefix.
_BASE_PREFIX = "model."
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
_HEAD = "lm_head.weight"
_NUM_NAMED = 5


def checkpoint_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Where each tensor of a checkpoint goes, by its Hugging Face name."""
    slots: dict[str, WeightSlot] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0] if isinstance(module, LinearBase) else name
        own = getattr(module, "checkpoint_slots", None)
        for part, slot in (_whole_slots(module) if own is None else own()).items():
            slots[f"{parent}.{part}"] = slot
    return slots


def _whole_slots(module: nn.Module) -> dict[str, WeightSlot]:
    """Of the parameters of a module that every rank holds whole."""
    return {
        name: WeightSlot(parameter.data, tuple(map(Shard.whole, parameter.shape)))
        for name, parameter in module.named_parameters(recurse=False)
    }


def load_weights(model: nn.Module, folder: Path, use_tqdm: bool = False) -> None:
    """Copy this rank's part of every tensor of the folder's safetensors into the model, converting to the parameters'
    dtype.

    Raises:
        ValueError: a weight that is missing, unexpected, or of another shape; the message names it.
    """
    slots = checkpoint_slots(model)
    expected = len(slots)
    tied = _HEAD not in slots
    unexpected: list[str] = []
    with progress_bar("Loading weights", expected, use_tqdm) as bar:
        for name, tensor in iterate_tensors(shard_files(folder)):
            if name.endswith(_IGNORED_SUFFIX) or (tied and name == _HEAD):
                continue
            key = name if name in slots else _BASE_PREFIX + name
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
