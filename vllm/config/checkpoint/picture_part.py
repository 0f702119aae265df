"""The part of a checkpoint that reads pictures: whether it can be used."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from vllm.config.checkpoint.text_part import WHOLE

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")

# Models of two towers, by model_type.
_PAIRS = ("clip", "siglip", "siglip2")
# Packages of transformers' picture parts, beside Pillow, by model_type.
_NEEDED = {
    "cohere2_vision": ("torchvision",),
    "fast_vlm": ("timm", "torchvision"),
    "gemma3n": ("timm", "torchvision"),
    "gemma4_unified": ("torchvision",),
    "kimi_k25": ("torchvision",),
    "lfm2_vl": ("torchvision",),
    "llama4": ("torchvision",),
    "perception_lm": ("timm", "torchvision"),
}


def why_no_pictures(raw: dict[str, Any], folder: Path) -> str:
    """Why a model reads no pictures; empty: it does. `raw`: the text decoder's config.json."""
    whole = raw if raw.get("model_type") in _PAIRS else raw.get(WHOLE) or {}
    if not isinstance(whole.get("vision_config"), dict):
        return "this model reads text only"
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return f"the model's folder has no {' or '.join(_PROCESSORS)}"
    missing = [name for name in _NEEDED.get(str(whole.get("model_type")), ()) if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        return f"transformers' parts of this model that read pictures need {names}: pip install {' '.join(missing)}"
    return ""


def check_processor(raw: dict[str, Any], folder: Path) -> None:
    """Check what a model that reads pictures needs, before it loads.

    Raises:
        ValueError: Pillow is missing, or a file of its processor is not JSON.
    """
    if why_no_pictures(raw, folder):
        return
    alone = "pass language_model_only=True to run its text decoder alone"
    if importlib.util.find_spec("PIL") is None:
        raise ValueError(f"{folder.name} reads pictures, and Pillow is missing: pip install 'vllm[vision]', or {alone}")
    for name in _PROCESSORS:
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as error:
            raise ValueError(f"{folder.name}/{name} is not JSON: {error}; mend it, or {alone}") from None
        if not isinstance(found, dict):
            raise ValueError(
                f"{folder.name}/{name} must be a JSON object, got {type(found).__name__}; mend it, or {alone}"
            )
