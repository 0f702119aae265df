"""Single weights, as models of callers load them."""

from __future__ import annotations

from torch import Tensor


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
