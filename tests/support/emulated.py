"""A library of operators whose widest levels are emulated: csrc/cpu/half_lanes.h says how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build() -> tuple[Path | None, str]:
    """The library, built unless it is of just these sources, or None and why not."""
    command = [sys.executable, "setup.py", "--quiet", "build_emulated"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (built.stderr if built.returncode else built.stdout).splitlines() or ["setup.py says nothing"]
    return (None, lines[-1]) if built.returncode else (Path(lines[-1]), "")


def use_emulated_library() -> None:
    """Operators of this process are that library's, if none was loaded yet."""
    from vllm.ops import _dispatch

    library, reason = build()
    if library is None:
        raise pytest.UsageError(f"--emulated: {reason}")
    _dispatch.LIBRARY = library
