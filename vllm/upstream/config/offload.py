"""Weights kept on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice, number

OffloadBackend = Literal["auto", "uva", "prefetch"]

_INSTEAD = "weights are not kept on the host; quantization='int8' halves them, tensor_parallel_size splits them"


@dataclass
class UVAOffloadConfig(UnservedConfig):
    """GiB of weights that a GPU reads from the host's memory."""

    instead: ClassVar[str] = _INSTEAD

    cpu_offload_gb: float = number(0, 0)
    cpu_offload_params: set[str] = field(default_factory=set)


@dataclass
class PrefetchOffloadConfig(UnservedConfig):
    """Layers whose weights are copied to the GPU before their turn."""

    instead: ClassVar[str] = _INSTEAD

    offload_group_size: int = number(0, 0)
    offload_num_in_group: int = number(1, 1)
    offload_prefetch_step: int = number(1, 0)
    offload_params: set[str] = field(default_factory=set)


@dataclass
class OffloadConfig(UnservedConfig):
    """Either way."""

    instead: ClassVar[str] = _INSTEAD

    offload_backend: OffloadBackend = choice("auto", "auto", "uva", "prefetch")
    uva: UVAOffloadConfig = field(default_factory=UVAOffloadConfig)
    prefetch: PrefetchOffloadConfig = field(default_factory=PrefetchOffloadConfig)
