"""Slot tables with a host and a device copy, joined by one upload a step, and other uploads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class StagedTensor:
    """A table with one row a slot: `np` on the host, where rows are staged, and `tensor` for device code. On CPU both
    are the same memory. On CUDA `apply_staged_writes` uploads every row staged since the last call, in one copy that
    does not wait."""

    def __init__(
        self, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | str, fill: float | int = 0
    ) -> None:
        """`shape` is S, [S] or [S, W], slots first; `fill` is the value of rows not staged yet."""
        self.device = torch.device(device)
        self._dtype = dtype
        self._fill = fill
        self._dirty: set[int] = set()
        shape = (shape,) if isinstance(shape, int) else shape
        self._set_host(self._filled(shape))
        self.tensor = self._host if self._shared else torch.full(shape, fill, dtype=dtype, device=self.device)

    @property
    def _shared(self) -> bool:
        return self.device.type == "cpu"

    def _filled(self, shape: tuple[int, ...]) -> Tensor:
        # zeros is calloc: rows that no request ever uses then cost no memory.
        host = torch.zeros(shape, dtype=self._dtype)
        return host.fill_(self._fill) if self._fill else host

    def _set_host(self, host: Tensor) -> None:
        self._host = host
        self.np: np.ndarray = host.numpy()

    def stage(self, row: int, value: Any) -> None:
        """Set a whole row: a scalar, or an array that broadcasts to the row."""
        self.np[row] = value
        if not self._shared:
            self._dirty.add(row)

    def ensure_width(self, width: int) -> None:
        """Make a [S, W] table at least `width` columns wide, at least doubling it when it grows; new columns hold the
        fill value. `np` and `tensor` are new objects afterwards."""
        rows, old = self.np.shape
        if width <= old:
            return
        wider = self._filled((rows, max(width, 2 * old)))
        wider[:, :old] = self._host
        self._set_host(wider)
        self.tensor = upload(self.np, self.device)  # staged rows included
        self._dirty.clear()

    def apply_staged_writes(self) -> None:
        """Make every staged row visible on the device."""
        if not self._dirty:
            return
        rows = np.fromiter(self._dirty, dtype=np.int64, count=len(self._dirty))
        self._dirty.clear()
        self.tensor.index_copy_(0, upload(rows, self.device), upload(self.np[rows], self.device))

    def of(self, slots: np.ndarray) -> Tensor:
        """The rows of `slots` (int [R]) on the device: [R] or [R, W]."""
        return self.tensor[upload(slots, self.device)]


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`, without waiting. On CPU it shares the memory; for CUDA it is copied to pinned memory
    first, so that the caller may reuse it at once."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """As `upload`, but in one copy on CUDA. For alignment, arrays of larger dtypes must come first."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [array.nbytes for array in arrays]
    staged = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays], out=staged.numpy())
    parts = staged.to(device, non_blocking=True).split(sizes)
    return [
        part.view(torch.from_numpy(array).dtype).view(array.shape) for part, array in zip(parts, arrays, strict=True)
    ]


def upload_into(target: Tensor, array: np.ndarray) -> None:
    """Copy the array into a tensor of its shape and dtype, without waiting."""
    source = torch.from_numpy(array)
    if target.device.type != "cpu":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
