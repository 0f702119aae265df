"""Sizes in bytes, and a device's memory."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from vllm.upstream.refusals import Unserved
from vllm.upstream.utils.mem_constants import GiB_bytes, KiB_bytes, MiB_bytes
from vllm.upstream.utils.unserved import refuse


def format_kib(b: int) -> str:
    """The number of KiB, to two places."""
    return f"{b / KiB_bytes:.2f}"


def format_mib(b: int) -> str:
    """The number of MiB, to two places."""
    return f"{b / MiB_bytes:.2f}"


def format_gib(b: int) -> str:
    """The number of GiB, to two places."""
    return f"{b / GiB_bytes:.2f}"


class DeviceMemoryProfiler:
    """How many bytes of a CUDA device's memory torch took within: `consumed_memory`. 0 on a CPU."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.consumed_memory = 0.0

    def current_memory_usage(self) -> float:
        """The most that torch has had allocated, in bytes."""
        import torch

        return torch.cuda.max_memory_allocated(self.device) if torch.cuda.is_available() else 0.0

    def __enter__(self) -> DeviceMemoryProfiler:
        self.initial_memory = self.current_memory_usage()
        return self

    def __exit__(self, *error: object) -> None:
        import gc

        self.final_memory = self.current_memory_usage()
        self.consumed_memory = self.final_memory - self.initial_memory
        gc.collect()


class MemorySnapshot(Unserved):
    """A GPU's memory at one moment."""

    instead: ClassVar[str] = "torch.cuda.mem_get_info measures it; docs/memory.md says how the engine shares it out"


def memory_profiling(*args: Any, **kwargs: Any) -> NoReturn:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("memory_profiling", "torch.cuda.memory_stats measures it; docs/memory.md says how the engine shares it out")
