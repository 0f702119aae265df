"""Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def not_collected() -> Iterator[None]:
    """Within the block the collector does not run by itself. Importing torch and the engine makes objects that stay: to
    visit them again and again took a ninth of a start's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
