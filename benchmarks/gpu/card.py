"""The GPU, its measured copy bandwidth and bfloat16 rate, and that of its host."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from common import describe_machine

from gpu.setting import Case, Setting
from gpu.timing import Call, time_in_turns
from vllm.ops._dispatch import ISA_LEVELS, cpu_ops
from vllm.ops.packed_linear import PackedLinear, pack_linear, packed_linear

_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


def make_cases(setting: Setting) -> dict[str, Case]:
    """Facts first, then rates."""
    return {
        "facts": lambda: describe_card(setting.device),
        "copy": lambda: _copy_rate(setting),
        "matrix": lambda: _matrix_rate(setting),
        "host": lambda: _host_rates(setting),
    }


def describe_card(device: torch.device) -> dict[str, Any]:
    """The GPU, its driver and clocks, versions of the software."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    if device.type != "cuda":
        return {**facts, "card": str(describe_machine()["cpu"])}
    properties = torch.cuda.get_device_properties(device)
    facts.update(
        card=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        cuda=torch.version.cuda,
    )
    return {**facts, "nvidia_smi": _ask_driver()}


def _ask_driver() -> dict[str, str] | str:
    """Version, clocks, power and temperature, or the reason why there are none."""
    try:
        asked = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
        return dict(zip(_QUERY.split(","), map(str.strip, answer.splitlines()[0].split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        return f"nvidia-smi did not answer: {error!r}"


def _copy_rate(setting: Setting) -> dict[str, Any]:
    """Bytes read and written by a copy a second."""
    source = torch.ones(setting.sizes.copy_bytes, dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    seconds = time_in_turns({"copy": [lambda: target.copy_(source)]}, setting.device, setting.sizes.repeats)["copy"]
    return {"copy_bytes_per_second": 2 * setting.sizes.copy_bytes / seconds, "seconds": seconds}


def _matrix_rate(setting: Setting) -> dict[str, Any]:
    """Operations of a large bfloat16 product a second; a multiplication and an addition are two."""
    size = setting.sizes.matrix
    a, b = (torch.randn(size, size, device=setting.device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    calls = [lambda: torch.mm(a, b, out=out)] * setting.sizes.copies
    seconds = time_in_turns({"mm": calls}, setting.device, setting.sizes.repeats)["mm"]
    rate = {"matrix_flops_per_second": 2 * size**3 / seconds, "seconds": seconds}
    # At once, so that the clocks are those under load.
    return {**rate, "nvidia_smi": _ask_driver()} if setting.device.type == "cuda" else rate


def _host_rates(setting: Setting) -> dict[str, Any]:
    """Operations of bfloat16 products on the host's cores a second, by instruction-set level; nothing where our kernels
    are not built."""
    operators = cpu_ops()
    if operators is None:
        return {}
    (columns, inner), rows = setting.sizes.shape.matrices()["gate_up"], setting.sizes.reading_rows
    weight, x = torch.randn(columns, inner).bfloat16(), torch.randn(rows, inner).bfloat16()

    def product(level: int, packed: PackedLinear) -> Call:
        def call() -> None:
            operators.set_isa(level)
            packed_linear(x, packed)

        return call

    widest = operators.set_isa(-1)
    try:
        # The portable level would take most of the time.
        levels = [level for level in range(1, widest + 1) if operators.set_isa(level) == level]
        calls: dict[str, list[Call]] = {}
        for level in levels:
            operators.set_isa(level)
            calls[ISA_LEVELS[level]] = [product(level, pack_linear(weight, None))]
        seconds = time_in_turns(calls, torch.device("cpu"), setting.sizes.repeats)
    finally:
        operators.set_isa(widest)
    rates = {level: 2 * rows * columns * inner / each for level, each in seconds.items()}
    return {"host": str(describe_machine()["cpu"]), "host_flops": rates}
