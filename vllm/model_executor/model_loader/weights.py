"""Fills a model's parameters from a checkpoint, tensor by tensor, or with random numbers."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm.model_executor.layers.sharding import WeightSlot
from vllm.model_executor.layers.weight_update import BASE_PREFIX, HEAD, checkpoint_parts, module_slots
from vllm.model_executor.model_loader.safetensors_file import iterate_tensors, progress_bar, shard_files

_NUM_NAMED = 5
_DUMMY_STD = 0.02


def checkpoint_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Where each tensor of a checkpoint goes, by its Hugging Face name."""
    return {key: slot for name, module in model.named_modules() for key, slot in module_slots(module, name).items()}


def load_weights(model: nn.Module, folder: Path, use_tqdm: bool = False) -> None:
    """Copy this rank's part of every tensor of the folder's safetensors into the model, converting to the parameters'
    dtype. ValueError names a weight that is missing, unexpected, or of another shape."""
    slots = checkpoint_slots(model)
    expected = len(slots)
    tied = HEAD not in slots
    unexpected: list[str] = []
    with progress_bar("Loading weights", expected, use_tqdm) as bar:
        tensors = iterate_tensors(shard_files(folder))
        convert = getattr(model, "convert_checkpoint", None)
        for name, tensor in tensors if convert is None else convert(tensors):
            for part, values in _parts(model, folder, name, tensor):
                if tied and part == HEAD:
                    continue
                key = part if part in slots else BASE_PREFIX + part
                slot = slots.pop(key, None)
                if slot is None:
                    unexpected.append(name)
                    continue
                if slot.shape != tuple(values.shape):
                    raise ValueError(
                        f"{folder.name}: weight {name} has shape {tuple(values.shape)}, but config.json means "
                        f"{slot.shape}"
                    )
                slot.fill(values)
                bar.update()
    _refuse(folder, "lacks", list(slots))
    _refuse(folder, "has unexpected", unexpected)


def _parts(model: nn.Module, folder: Path, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    try:
        return list(checkpoint_parts(model, name, tensor))
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from None


def _refuse(folder: Path, verb: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        raise ValueError(f"{folder.name} {verb} weights: {', '.join(names[:_NUM_NAMED])}{more}")


def fill_with_noise(model: nn.Module, seed: int) -> None:
    """Fill every weight that a checkpoint would with `dummy_weight`, of which a rank takes its part."""
    for name, slot in checkpoint_slots(model).items():
        slot.fill(dummy_weight(name, slot.shape, slot.target.dtype, slot.target.device, seed))


def dummy_weight(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, seed: int
) -> Tensor:
    """A checkpoint's tensor of that name: normal numbers with a standard deviation of 0.02, plus 1 in the vectors that
    scale a norm. Equal arguments give equal tensors, in any process; another device or dtype gives another one."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _DUMMY_STD, generator=generator)
    is_scale = len(shape) == 1 and name.endswith(".weight")
    return values.add_(1.0) if is_scale else values
