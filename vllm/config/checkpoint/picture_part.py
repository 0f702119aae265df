"""The part of a checkpoint that reads pictures: whether it can be used."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from vllm.config.checkpoint.text_part import MARK, WHOLE

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def why_no_pictures(raw: dict[str, Any], folder: Path) -> str:
    """Why a model reads no pictures; empty: it does. `raw`: the text decoder's config.json."""
    if MARK not in raw or not isinstance(raw[WHOLE].get("vision_config"), dict):
        return "this model reads text only"
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return f"the model's folder has no {' or '.join(_PROCESSORS)}"
    if importlib.util.find_spec("PIL") is None:
        return "Pillow is missing: install vllm[vision]"
    return ""
