"""Rows in place of a picture: what the model's tower would make of it, and what its processor would say of its size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.embeds import INTEGERS, load_tensor

if TYPE_CHECKING:
    import torch

ROWS, GRID = "image_embeds", "image_grid_thw"
_MAX_VALUES = 64  # of what is said of one picture's size


@dataclass(frozen=True, eq=False)
class GivenRows:
    """The rows of a picture.

    Attributes:
        rows: [N, W] in the model's dtype, on the CPU.
        fields: int64 [1, ...] each, the processor's values beside the pixels, by their names.
    """

    rows: torch.Tensor
    fields: dict[str, torch.Tensor]

    @classmethod
    def of(cls, given: Mapping[str, Any], width: int, longest: int, dtype: str) -> GivenRows:
        """
        Args:
            given: image_embeds [N, W] or [1, N, W] and further fields, tensors or base64 of what torch.save writes.
            width: W of the model.
            longest: the most rows.
            dtype: the model's.

        Raises:
            VLLMValidationError: any of this does not hold, or a value is not finite.
        """
        import torch

        if given.get(ROWS) is None:
            raise VLLMValidationError(f"{ROWS} is required beside {', '.join(map(shown, given)) or 'it'}", ROWS)
        rows = given[ROWS]
        if isinstance(rows, str):
            rows = load_tensor(ROWS, rows, longest * width)
        if not isinstance(rows, torch.Tensor):
            raise VLLMValidationError(f"{ROWS} must be a tensor [N, {width}], got {type(rows).__name__}", ROWS)
        if not rows.is_floating_point() or rows.layout is not torch.strided or rows.is_nested or rows.is_meta:
            found = f"{rows.dtype} on {rows.device}, {rows.layout}"
            raise VLLMValidationError(f"{ROWS} must be a dense tensor [N, {width}] of floats, got {found}", ROWS)
        shape = list(rows.shape)
        if rows.dim() == 3 and len(rows) == 1:
            rows = rows[0]
        if rows.dim() != 2 or rows.shape[1] != width or not 0 < len(rows) <= longest:
            message = f"{ROWS} must be 1 to {longest} rows of {width} values, those of the model's tower; got {shape}"
            raise VLLMValidationError(message, ROWS, shape)
        # A copy, which the caller's changes do not reach.
        rows = rows.detach().to("cpu", getattr(torch, dtype), copy=True).contiguous()
        if not torch.isfinite(rows).all():
            raise VLLMValidationError(f"{ROWS} has values that are not finite in {dtype}, the model's dtype", ROWS)
        return cls(rows, {name: _sizes(name, value) for name, value in given.items() if name != ROWS})

    @property
    def digest(self) -> bytes:
        """Names the rows and the fields."""
        import torch

        content = hashlib.blake2b(f"{self.rows.dtype} {list(self.rows.shape)}".encode(), digest_size=16)
        content.update(self.rows.view(torch.uint8).numpy().data)
        content.update(repr([(name, value.tolist()) for name, value in sorted(self.fields.items())]).encode())
        return content.digest()


def _sizes(name: Any, value: Any) -> torch.Tensor:
    """int64 [1, ...], what a field says of a picture's size."""
    import torch

    place = f"{ROWS}: {name}"
    if isinstance(value, str):
        value = load_tensor(place, value, _MAX_VALUES, INTEGERS)
    try:
        found = np.asarray(value)
    except Exception:  # what numpy makes nothing of fails in many ways
        found = np.asarray(None)
    is_one = found.ndim < 2 or len(found) == 1
    if found.dtype.kind not in "iu" or not 0 < found.size <= _MAX_VALUES or found.min() < 0 or not is_one:
        message = f"{place} must be integers from 0 on, at most {_MAX_VALUES} of a picture, got {shown(value)}"
        raise VLLMValidationError(message, ROWS)
    return torch.from_numpy(found.astype(np.int64).reshape(1, *found.shape[found.ndim > 1 :]))


def are_rows(value: Any, *dimensions: int) -> bool:
    """Whether it is a tensor of floats with so many dimensions: [N, W], or [pictures, N, W]."""
    is_floats = getattr(value, "is_floating_point", None)
    return is_floats is not None and value.ndim in dimensions and bool(is_floats())


def rows_of_pictures(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Each picture's part of rows that may be those of several, one after the other.

    Raises:
        VLLMValidationError: their sizes do not fit the rows.
    """
    rows: Any = given.get(ROWS)
    grids: Any = given.get(GRID)
    if isinstance(rows, (list, tuple)) or getattr(rows, "ndim", 0) == 3:
        pieces = list(rows)
    elif getattr(grids, "ndim", 0) == 2 and len(grids) > 1 and hasattr(rows, "ndim"):
        areas = [int(np.prod(np.asarray(grid))) for grid in grids]
        lengths = [len(rows) * area // max(sum(areas), 1) for area in areas]
        if sum(lengths) != len(rows) or min(lengths) < 0:
            message = f"{ROWS} has {len(rows)} rows, which are not those of {len(grids)} pictures of these {GRID}"
            raise VLLMValidationError(message, ROWS, len(rows))
        ends = list(accumulate(lengths))
        pieces = [rows[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    else:
        return (given,)
    others = {name: value for name, value in given.items() if name != ROWS}
    for name, value in others.items():
        is_list = isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0
        if not is_list or len(value) != len(pieces):
            message = f"{ROWS}: {name} must have a value for each of the {len(pieces)} pictures, got {shown(value)}"
            raise VLLMValidationError(message, ROWS)
    return tuple(
        {ROWS: piece, **{name: value[index] for name, value in others.items()}} for index, piece in enumerate(pieces)
    )
