"""Waits for a GPU that are meant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def gpu_sync_allowed() -> Iterator[None]:
    """torch.cuda.set_sync_debug_mode neither warns nor raises within."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
