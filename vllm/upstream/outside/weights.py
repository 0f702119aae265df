"""Weights as upstream's models load them: each parameter has a `weight_loader`, which takes the rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vllm.layers.sharding import WeightSlot


def default_weight_loader(param: Tensor, loaded_weight: Tensor) -> None:
    """Copy a weight into a parameter.

    Raises:
        ValueError: they differ in shape.
    """
    if param.numel() == loaded_weight.numel() == 1:
        param.data.fill_(loaded_weight.item())
        return
    if param.shape != loaded_weight.shape:
        raise ValueError(f"a weight of shape {tuple(loaded_weight.shape)} for a parameter of {tuple(param.shape)}")
    param.data.copy_(loaded_weight)


def row_parallel_weight_loader(param: Tensor, loaded_weight: Tensor) -> None:
    """Copy the rank's part along the first dimension, as `sharded_weight_loader(0)`; a vector or number as it is."""
    sharded_weight_loader(0)(param, loaded_weight) if param.dim() == 1 else default_weight_loader(param, loaded_weight)


def sharded_weight_loader(shard_axis: int) -> Callable[[Tensor, Tensor], None]:
    """A loader that takes the rank's part along a dimension."""

    def load(param: Tensor, loaded_weight: Tensor) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        size = param.shape[shard_axis]
        start = get_tp_group().rank * size
        if loaded_weight.shape[shard_axis] < start + size:
            raise ValueError(
                f"a weight of {loaded_weight.shape[shard_axis]} rows for a rank's part of {start} to {start + size}"
            )
        default_weight_loader(param, loaded_weight.narrow(shard_axis, start, size))

    return load


def composed_weight_loader(
    loader: Callable[[Tensor, Tensor], None], fn: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], None]:
    """A loader whose result becomes fn of it."""

    def load(param: Tensor, loaded_weight: Tensor) -> None:
        loader(param, loaded_weight)
        param.data.copy_(fn(param))

    return load


def maybe_remap_kv_scale_name(name: str, params_dict: dict[str, Any]) -> str | None:
    """`name`, or None for a cache's scale that no parameter takes: keys and values have no scales in these models."""
    endings = (".kv_scale", ".k_scale", ".v_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
    return None if name.endswith(endings) and name not in params_dict else name


def set_loader(parameter: nn.Parameter | None, loader: Callable[..., Any], **attributes: Any) -> None:
    """Give a parameter, if there is one, its `weight_loader` and further attributes."""
    if parameter is not None:
        for name, value in {"weight_loader": loader, **attributes}.items():
            setattr(parameter, name, value)


def fill(slot: WeightSlot, tensor: Tensor, owner: str) -> None:
    """Copy this rank's part of a checkpoint's tensor.

    Raises:
        ValueError: it has another shape than the layer `owner`.
    """
    if slot.shape == (1,) and tensor.dim() == 0:
        tensor = tensor.view(1)
    if tuple(tensor.shape) != slot.shape:
        raise ValueError(f"{owner}: the weight has shape {tuple(tensor.shape)}, but the layer means {slot.shape}")
    slot.fill(tensor)


def split_rows(tensor: Tensor, slots: Iterable[WeightSlot], owner: str) -> list[Tensor]:
    """The rows of a fused tensor that belong to each slot.

    Raises:
        ValueError: it has not as many rows as they.
    """
    sizes = [slot.shape[0] for slot in slots]
    if tensor.dim() == 0 or tensor.shape[0] != sum(sizes):
        raise ValueError(f"{owner}: the weight has shape {tuple(tensor.shape)}, but the layer means {sum(sizes)} rows")
    return list(torch.split(tensor, sizes))
