"""The part of a checkpoint that reads pictures: whether it can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def why_no_pictures(raw: dict[str, Any], folder: Path) -> str:
    """Why a model reads no pictures; empty: it does. `raw`: the text decoder's config.json."""
    return "this model reads text only"
