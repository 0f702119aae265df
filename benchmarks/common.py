"""Shared by the scripts: the package's path, flags, the description of the machine, JSON output."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# This checkout's package, installed or not.
sys.path.insert(0, str(ROOT))

_ISA_FLAGS = "avx2 fma avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 asimd sve bf16".split()


def describe_machine() -> dict[str, object]:
    """{"cpu": model name, "cores": processors this process may use, "isa": relevant instruction sets}."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n", 1)[0].splitlines() if path.exists() else []
    info = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = info.get("flags", info.get("Features", "")).split()
    name = info.get("model name") or platform.processor() or platform.machine()
    return {"cpu": name, "cores": usable_cores(), "isa": [flag for flag in _ISA_FLAGS if flag in flags]}


def usable_cores() -> int:
    """Processors that this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_all_cores() -> None:
    """Let OpenMP use every core unless OMP_NUM_THREADS is set. Call before torch is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def utc_now() -> str:
    """The date of a result."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_result(**fields: object) -> None:
    """Print a result and the machine as one line of JSON."""
    print(json.dumps({**fields, "machine": describe_machine()}), flush=True)


def seconds_of(call: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def make_parser(question: str, model: bool = True, dtype: bool = False) -> argparse.ArgumentParser:
    """A parser, with --model and --dtype if requested."""
    parser = argparse.ArgumentParser(description=question)
    if model:
        parser.add_argument("--model", help="folder or .gguf file; default: the embedded model")
    if dtype:
        parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    return parser


def add_counts(parser: argparse.ArgumentParser, **flags: tuple[int, str]) -> None:
    """Add integer flags: name -> (default, help)."""
    for name, (default, text) in flags.items():
        text = f"{text} (default: %(default)s)" if text else "default: %(default)s"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=text)


def some_of(known: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """argparse type: comma-separated names out of `known`; `what` names one in errors."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
        return found

    return names


def cpu_seconds(*_: object) -> float:
    """CPU seconds of this process so far, those of its threads included."""
    return time.process_time()


def status_kib(pid: int) -> dict[str, int]:
    """The KiB fields of /proc/PID/status; empty if the process has ended. Linux only."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
