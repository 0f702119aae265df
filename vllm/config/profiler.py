"""Settings of the profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice, number

ProfilerKind = Literal["torch", "cuda", "proton"]


@dataclass
class ProfilerConfig(UnservedConfig):
    """The profiler, and the folder of its traces."""

    instead: ClassVar[str] = "it takes profiler='torch' and torch_profiler_dir"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "torch_profiler_with_stack", "torch_profiler_with_flops", "torch_profiler_use_gzip",
            "torch_profiler_dump_cuda_time_total", "torch_profiler_record_shapes", "torch_profiler_with_memory",
            "ignore_frontend", "delay_iterations", "max_iterations", "warmup_iterations", "active_iterations",
            "wait_iterations",
        }
    )  # fmt: skip

    profiler: ProfilerKind | None = choice(None, "torch", "cuda", "proton")
    torch_profiler_dir: str = ""
    torch_profiler_activities: list[str] | None = None
    proton_profiler_dir: str = ""
    proton_context: str = choice("shadow", "shadow", "python")
    proton_data: str = choice("tree", "tree", "trace")
    proton_backend: str | None = choice(None, "cupti")
    proton_mode: str | None = None
    proton_hook: str | None = choice(None, "triton")
    proton_output_format: str | None = choice(None, "hatchet", "hatchet_msgpack", "chrome_trace")
    proton_graph_attribution: bool = False
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_dump_cuda_time_total: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    capture_torch_profiler: bool = False
    detailed_trace_annotation: bool = False
    ignore_frontend: bool = False
    delay_iterations: int = number(0, 0)
    max_iterations: int = number(0, 0)
    warmup_iterations: int = number(0, 0)
    active_iterations: int = number(5, 1)
    wait_iterations: int = number(0, 0)
