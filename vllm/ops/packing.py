"""Weights are packed in threads of their own while the caller prepares more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm.ops._dispatch import of_device
from vllm.ops.quantized_tensor import QuantizedTensor, is_finite

_SEARCHED = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class _Background(threading.local):
    """Errors that the calling thread has to raise in the end, each where its uint8 [1] is not 0."""

    checks: list[tuple[Tensor, Callable[[], ValueError]]] | None = field(default=None)


_background = _Background()


@contextmanager
def packing_in_background(num_bytes: int = 0) -> Iterator[None]:
    """Weights that the block packs by the C++ operators, in its own thread, are there when it has ended: those return
    at once. `num_bytes`: about how much that will be. ValueError: a weight that it gave `refuse_unless_finite` is not
    finite."""
    if of_device("cpu") != "cpp":
        yield
        return
    if _background.checks is not None:
        raise RuntimeError("packing in the background has begun")
    checks = _background.checks = []
    is_whole = False
    try:
        torch.ops.vllm_cpu.begin_packing(max(1, torch.get_num_threads() - 1), num_bytes)
        yield
        is_whole = True
    finally:
        torch.ops.vllm_cpu.finish_packing(not is_whole)
        _background.checks = None
    for found, make_error in checks:
        if found.item():
            raise make_error()


def refuse_unless_finite(weight: QuantizedTensor, make_error: Callable[[], ValueError]) -> None:
    """ValueError where what the weight's codes are multiplied with, added to or stand for is not finite; within
    `packing_in_background` it is raised at the end."""
    if _background.checks is None:
        if not weight.is_finite():
            raise make_error()
        return
    found, searched = torch.zeros(1, dtype=torch.uint8), []
    for part in weight.float_parts():
        if part.dim() == 2 and part.dtype in _SEARCHED:
            searched.append(part)
        elif not is_finite(part):
            raise make_error()
    torch.ops.vllm_cpu.find_not_finite_(found, searched)
    _background.checks.append((found, make_error))
