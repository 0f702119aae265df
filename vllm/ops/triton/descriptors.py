"""Blocks of a matrix that a GPU fetches by a descriptor (TMA), from Hopper on: no thread computes an address, and what
lies outside of the matrix reads as zero."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm.logger import init_logger

logger = init_logger(__name__)

_ALIGNMENT_BYTES = 16
# Hopper and the data centres' Blackwell. Others have the copies, but neither this much shared memory nor products that
# read it.
_GENERATIONS = (9, 10)


def are_fetched() -> bool:
    """Whether kernels should be given descriptors on this device."""
    return not triton.knobs.runtime.interpret and architecture() // 10 in _GENERATIONS


def architecture() -> int:
    """Ten times the compute capability that Triton compiles for."""
    return triton.runtime.driver.active.get_current_target().arch


def can_describe(matrix: Tensor) -> bool:
    """Whether the hardware takes a matrix: base and rows aligned, neighbouring elements of a row side by side."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    is_aligned = matrix.data_ptr() % _ALIGNMENT_BYTES == 0 and row_bytes % _ALIGNMENT_BYTES == 0
    return is_aligned and matrix.stride(1) == 1 and row_bytes > 0 and matrix.numel() > 0


def describe(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix that is fetched in blocks of this size."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


class Variant:
    """A faster way to launch a kernel, which is given up when the first try fails: a start must not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_on = True

    def launch(self, launch: Callable[[], object]) -> bool:
        """Call `launch`, which launches a kernel; False: it failed, now or before."""
        if not self.is_on:
            return False
        try:
            launch()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.is_on = False
            reason = str(error).strip().splitlines() or [""]
            logger.warning("%s is not used, a slower kernel is: %s: %s", self.name, type(error).__name__, reason[0])
            return False
        return True
