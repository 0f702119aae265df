"""torch's settings and dtypes."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

STR_DTYPE_TO_TORCH_DTYPE: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
TORCH_DTYPE_TO_NUMPY_DTYPE = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.uint8: np.uint8,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


def set_random_seed(seed: int | None, data_parallel_index: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators; None leaves them as they are. Our sampling uses none of them.

    Args:
        data_parallel_index: which replica this is, so that each draws other numbers.
    """
    if seed is None:
        return
    seed += data_parallel_index
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype within."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def set_default_torch_num_threads(num_threads: int | None = None) -> Iterator[None]:
    """torch's number of threads within; None: as it is."""
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def get_dtype_size(dtype: torch.dtype) -> int:
    """Bytes an element."""
    return dtype.itemsize


def is_torch_equal_or_newer(target: str) -> bool:
    """Whether the installed torch is of that version or a later one."""
    from packaging.version import Version

    return Version(torch.__version__) >= Version(target)


def is_torch_equal(target: str) -> bool:
    """Whether the installed torch is of that version, whatever it was built for."""
    from packaging.version import Version

    return Version(torch.__version__).release == Version(target).release


def make_ndarray_with_pad(
    x: list[list[float]], pad: float, dtype: type | np.dtype, *, max_len: int | None = None
) -> np.ndarray:
    """Rows of one length, [len(x), max_len or the longest], filled up with `pad`."""
    width = max(map(len, x), default=0) if max_len is None else max_len
    made = np.full((len(x), width), pad, dtype=dtype)
    for row, values in zip(made, x, strict=True):
        row[: len(values)] = values
    return made


def make_tensor_with_pad(
    x: list[list[float]],
    pad: float,
    dtype: torch.dtype,
    *,
    max_len: int | None = None,
    device: str | torch.device | None = None,
    pin_memory: bool = False,
) -> torch.Tensor:
    """`make_ndarray_with_pad` as a tensor of the device."""
    made = torch.from_numpy(make_ndarray_with_pad(x, pad, np.float64, max_len=max_len)).to(dtype)
    return (made.pin_memory() if pin_memory else made).to(device)


def async_tensor_h2d(
    data: Sequence[Any] | np.ndarray | torch.Tensor,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """The data as a tensor of the device, which does not wait for the copy.

    Args:
        dtype: None: as torch.as_tensor chooses it.
        device: None: the CPU.
        pin_memory: whether the copy is from pinned memory; None: where the device is a GPU.
    """
    made = torch.as_tensor(data, dtype=dtype)
    device = torch.device("cpu" if device is None else device)
    if made.device.type == "cpu" and (device.type == "cuda" if pin_memory is None else pin_memory):
        made = made.pin_memory()
    return made.to(device, non_blocking=True)


def current_stream() -> torch.cuda.Stream:
    """CUDA's current stream.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    return torch.cuda.current_stream()


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: list[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: torch.library.Library | None = None,
    dispatch_key: str = "CPU",
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Register a function as torch.ops.vllm.<op_name>, or in another library.

    Args:
        mutates_args: the arguments that it changes.
        fake_impl: its results' shapes and dtypes, for torch.compile.
        dispatch_key: the device that it is for.
    """
    library = target_lib or _library()
    schema = torch.library.infer_schema(op_func, mutates_args=mutates_args or [])
    library.define(op_name + schema, tags=tags)
    library.impl(op_name, op_func, dispatch_key=dispatch_key)
    if fake_impl is not None:
        library._register_fake(op_name, fake_impl)


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("vllm", "FRAGMENT")
