"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_ISA_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
)


def describe_machine() -> dict[str, object]:
    """{"cpu": model name, "cores": processors this process may use, "isa": instruction sets that matter}."""
    info = _cpuinfo()
    flags = info.get("flags", info.get("Features", "")).split()
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
    }


def usable_cores() -> int:
    """Processors that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
