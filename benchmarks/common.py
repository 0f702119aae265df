"""What the scripts share: this checkout's package on the path, their flags, the machine that they ran on."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The package of the checkout that this file belongs to, installed or not.
sys.path.insert(0, str(ROOT))

_ISA_FLAGS = "avx2 fma avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 asimd sve bf16".split()


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


def use_all_cores() -> None:
    """Let OpenMP use every core, unless the environment says otherwise. Called before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def utc_now() -> str:
    """The date of a result."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_parser(question: str, model: bool = True, dtype: bool = False) -> argparse.ArgumentParser:
    """A script's parser, with --model and --dtype where asked for."""
    parser = argparse.ArgumentParser(description=question)
    if model:
        parser.add_argument("--model", help="folder or .gguf file; default: the embedded model")
    if dtype:
        parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    return parser


def add_counts(parser: argparse.ArgumentParser, **flags: tuple[int, str]) -> None:
    """Add flags that take a whole number: name -> (default, help)."""
    for name, (default, text) in flags.items():
        text = f"{text} (default: %(default)s)" if text else "default: %(default)s"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=text)


def some_of(known: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """argparse type: names of `known` with commas between them; an error calls one of them `what`."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
        return found

    return names


def status_kib(pid: int) -> dict[str, int]:
    """The fields in KiB of /proc/PID/status; none where the process has gone. Linux only."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
