"""Triton, where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

triton: Any = None
tl: Any = None
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except ImportError:
    pass

HAS_TRITON = triton is not None
"""Whether it can be imported."""

__all__ = ["HAS_TRITON", "tl", "triton"]
