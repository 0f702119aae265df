"""Fills a model's parameters from a checkpoint, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.progress import progress_bar
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors, shard_files

# Checkpoints saved from the model without its head lack this prefix.
_BASE_PREFIX = "model."
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
_HEAD = "lm_head.weight"
_NUM_NAMED = 5


def checkpoint_slots(model: nn.Module) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: its Hugging Face name -> the (part of a) parameter to fill."""
    slots: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent = name.rpartition(".")[0]
            for part, slot in module.checkpoint_slots().items():
                slots[f"{parent}.{part}"] = slot
        else:
            for part, parameter in module.named_parameters(recurse=False):
                slots[f"{name}.{part}"] = parameter.data
    return slots


def load_weights(model: nn.Module, folder: Path, use_tqdm: bool = False) -> None:
    """Copy every tensor of the folder's safetensors into the model, converting to the parameters' dtype.

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
            if slot.shape != tensor.shape:
                raise ValueError(
                    f"{folder.name}: weight {name} has shape {tuple(tensor.shape)}, but config.json means "
                    f"{tuple(slot.shape)}"
                )
            slot.copy_(tensor)
            bar.update()
    _refuse(folder, "lacks", list(slots))
    _refuse(folder, "has unexpected", unexpected)


def _refuse(folder: Path, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        raise ValueError(f"{folder.name} {verb} weights: {', '.join(names[:_NUM_NAMED])}{more}")
