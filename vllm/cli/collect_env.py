"""Describe this installation and machine, for a bug report. Loads no model."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from vllm.utils.device import usable_cores
from vllm.version import __version__

NAME = "collect-env"
HELP = "describe this installation and machine, for a bug report"
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    found = collect()
    print(json.dumps(found, indent=2) if args.json else "\n".join(_lines(found)))
    return 0


def described() -> str:
    """The text that the command prints."""
    return "\n".join(_lines(collect()))


def collect() -> dict[str, Any]:
    """Versions (None: not installed), CPU, CUDA devices, and the VLLM_ environment variables, secrets hidden."""
    import torch

    return {
        "vllm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        # torch.__version__ names the build, which the package's version may leave out.
        "packages": {name: _version(name) for name in _PACKAGES} | {"torch": torch.__version__},
        "cpu": _cpu(),
        "cuda": _cuda(),
        "environment": {
            name: "(hidden)" if name.endswith(_SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith("VLLM_")
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch

    from vllm.ops.cpu_kernels import cpu_kernel_isa

    try:
        isa, fault = cpu_kernel_isa(), None
    except ValueError as error:
        isa, fault = None, str(error)
    return {
        "model": cpu_model(),
        "usable_cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "kernels_loaded": isa is not None,
        "kernels_isa": isa,
        **({"kernels_fault": fault} if fault is not None else {}),
    }


def cpu_model() -> str:
    """The processor's name in /proc/cpuinfo, else its architecture."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cuda() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [
        {
            "name": device.name,
            "capability": f"{device.major}.{device.minor}",
            "memory_gib": round(device.total_memory / 2**30, 1),
        }
        for device in map(torch.cuda.get_device_properties, range(count))
    ]
    return {"torch_built_for": torch.version.cuda, "devices": devices}


def _lines(value: dict[str, Any], indent: str = "") -> Iterator[str]:
    """`name: value`, one a line, nested ones indented."""
    for name, item in value.items():
        if isinstance(item, dict):
            yield f"{indent}{name}:" if item else f"{indent}{name}: none"
            yield from _lines(item, indent + "  ")
        elif isinstance(item, list):
            yield f"{indent}{name}: {'; '.join(' '.join(map(str, each.values())) for each in item) or 'none'}"
        else:
            yield f"{indent}{name}: {'none' if item is None else item}"
