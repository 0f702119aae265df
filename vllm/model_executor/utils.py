"""What users' quantisation methods set on their parameters, as upstream's do."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def set_weight_attrs(weight: Tensor, weight_attrs: dict[str, Any] | None) -> None:
    """Give a parameter the attributes `weight_attrs`. ValueError: it has one of them already."""
    for name, value in (weight_attrs or {}).items():
        if hasattr(weight, name):
            raise ValueError(f"the parameter has the attribute {name!r} already")
        setattr(weight, name, value)
