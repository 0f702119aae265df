"""Where an adapter's files are, as upstream's callers ask."""

from __future__ import annotations

import os


def get_adapter_absolute_path(lora_path: str) -> str:
    """A folder's absolute path, `~` and relative paths resolved; a name of the hub as it is: nothing is downloaded."""
    if lora_path.startswith("~"):
        return os.path.expanduser(lora_path)
    return os.path.abspath(lora_path) if os.path.exists(lora_path) else lora_path
