"""Locks of files that end with the process that holds them."""

from __future__ import annotations

import os
from pathlib import Path


def is_locked(path: Path) -> bool:
    """Whether a living process has locked the file for itself; False: nobody has, or there is no such file."""
    import fcntl

    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that two who ask do not take each other for the holder.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
