"""Environment variables that the engine reads, each in one place, read at the time of use."""

from __future__ import annotations

import os
from pathlib import Path


def logging_level() -> str | None:
    """VLLM_LOGGING_LEVEL: a level name such as INFO or DEBUG; None when unset."""
    level = os.environ.get("VLLM_LOGGING_LEVEL")
    return level.strip().upper() if level else None


def cache_root() -> Path:
    """VLLM_CACHE_ROOT, else `vllm` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    root = os.environ.get("VLLM_CACHE_ROOT")
    if root:
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm"


def cpu_kvcache_space_bytes() -> int | None:
    """VLLM_CPU_KVCACHE_SPACE in bytes (the variable is in GiB); None when unset.

    Raises:
        ValueError: not a positive number.
    """
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if not text:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not gib > 0:
        raise ValueError(f"VLLM_CPU_KVCACHE_SPACE must be a positive number of GiB, got {text!r}")
    return int(gib * 2**30)
