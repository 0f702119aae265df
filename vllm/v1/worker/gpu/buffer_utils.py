"""Slot tables: written on the host a row at a time, read by device code, joined by one upload a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class StagedTensor:
    """A table with one row a slot, in two places.

    `np` is the host's array, where rows are staged and where vectorised decisions are read; `tensor` is what
    device code reads. On CPU both are the same memory, so staging is the write. On CUDA `apply_staged_writes`
    uploads every row staged since the last call, in one copy that does not wait.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        fill: float | int = 0,
    ) -> None:
        """
        Args:
            shape: [S] or [S, W]: slots first.
            dtype: of the elements; one that numpy has too.
            fill: the value of every element until its row is staged.
        """
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

    def _filled(self, shape: tuple[int, ...]) -> torch.Tensor:
        # zeros is calloc: rows that no request ever uses then cost no memory.
        if self._fill == 0:
            return torch.zeros(shape, dtype=self._dtype)
        return torch.full(shape, self._fill, dtype=self._dtype)

    def _set_host(self, host: torch.Tensor) -> None:
        self._host = host
        self.np: np.ndarray = host.numpy()

    def stage(self, row: int, value: Any) -> None:
        """Set a whole row: a scalar, or an array that broadcasts to the row."""
        self.np[row] = value
        if not self._shared:
            self._dirty.add(row)

    def ensure_width(self, width: int) -> None:
        """Make a [S, W] table at least `width` columns wide, at least doubling it when it grows. Old columns
        keep their contents; new ones hold the fill value. `np` and `tensor` are new objects afterwards."""
        rows, old = self.np.shape
        if width <= old:
            return
        wider = self._filled((rows, max(width, 2 * old)))
        wider[:, :old] = self._host
        self._set_host(wider)
        # The device's copy starts from the host's, staged rows included.
        self.tensor = upload(self.np, self.device)
        self._dirty.clear()

    def apply_staged_writes(self) -> None:
        """Make every staged row visible on the device."""
        if not self._dirty:
            return
        rows = np.fromiter(self._dirty, dtype=np.int64, count=len(self._dirty))
        self._dirty.clear()
        indices = upload(rows, self.device)
        self.tensor.index_copy_(0, indices, upload(self.np[rows], self.device))


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`, without waiting for the copy: CPU shares the memory, CUDA goes
    through a pinned copy, so that the caller may reuse the array at once."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
