"""Launches of Triton's kernels on CPU tensors, compiled for a GPU and run by the machine of ptx_machine.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ptx_machine
import torch
import triton
from ptx_memory import Memory
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from vllm.ops.triton import descriptors
from vllm.ops.triton.paged_tiles import shared_kib

_SCALARS = {"i32": np.int32, "i64": np.int64, "u32": np.uint32, "u64": np.uint64, "fp32": np.float32, "i1": np.uint8}


KEPT = Path(__file__).parents[2] / "build" / "triton"
"""Compiled kernels, for later runs, by their sources: without cubins, which nothing here runs."""

reachable: list[torch.Tensor] = []
"""Tensors that kernels may reach beside their arguments: by addresses in a table."""


class StandInDriver:
    """As much of a driver as compiling asks for; the device's number is its capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend_capability(capability: int) -> None:
    """Let Triton compile for GPUs of this capability."""
    triton.runtime.driver.set_active(StandInDriver(capability))
    # By device, of which there is one here.
    shared_kib.cache_clear()


@contextlib.contextmanager
def compiling_to_ptx() -> Iterator[None]:
    """While it lasts, Triton calls no assembler, and finds what it has compiled before in `KEPT`."""
    triton.knobs.cache.dir = str(KEPT)
    with mock.patch.object(CUDABackend, "make_cubin", lambda *_: b""):
        yield


@contextlib.contextmanager
def running_ptx(capability: int, change: Callable[[str], str] = str) -> Iterator[list[str]]:
    """While it lasts, a launch compiles the kernel for GPUs of this capability and runs what came out.

    Args:
        change: what is done to the PTX before it is run.

    Yields:
        the names of the kernels that have been run.
    """
    names: list[str] = []
    compile_ = JITFunction.run

    def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = compile_(kernel, *args, grid=grid, warmup=True, **kwargs)
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        memory, params = Memory(compiled.metadata.shared), []
        for tensor in reachable:
            memory.allow(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for name, kind in compiled.src.signature.items():
            if kind == "constexpr":
                continue
            value = given[name]
            if isinstance(value, torch.Tensor):
                memory.allow(value.untyped_storage().data_ptr(), value.untyped_storage().nbytes())
                params.append(np.array([value.data_ptr()], dtype=np.uint64))
            else:
                params.append(np.array([value], dtype=_SCALARS[kind]))
        size = tuple(grid(given) if callable(grid) else grid)
        num_threads = ptx_machine.WARP * compiled.metadata.num_warps
        ptx_machine.run(change(compiled.asm["ptx"]), params, memory, (*size, 1, 1)[:3], num_threads)
        names.append(kernel.__name__)

    pretend_capability(capability)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", launch))
        # The assembler's work is not run here; test_triton_cubins.py holds it.
        stack.enter_context(compiling_to_ptx())
        # The machine has no engine that fetches by descriptors.
        stack.enter_context(mock.patch.object(descriptors, "are_fetched", lambda: False))
        yield names
