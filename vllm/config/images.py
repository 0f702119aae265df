"""Answers about pictures when an engine starts."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import shown
from vllm.inputs.images import KINDS, MAX_IMAGES

_OTHER_MEDIA = ("audio", "vision_chunk")


def image_limit(given: Any) -> dict[str, int]:
    """limit_mm_per_prompt as {"image": N, "video": M}. Upstream's longer form, {"image": {"count": N}}, is one, too.

    Raises:
        ValueError: another kind of media is to be read, or a limit is no number.
    """
    if given is None:
        return {}
    name = "limit_mm_per_prompt"
    if not isinstance(given, dict):
        raise ValueError(f'{name} must be a dict such as {{"image": 4}}, got {shown(given)}')
    limits: dict[str, int] = {}
    for kind, value in given.items():
        if isinstance(value, dict):
            value = value.get("count", MAX_IMAGES)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}: {kind} must be a number from 0 on, got {shown(value)}")
        if kind in KINDS:
            limits[kind] = value
        elif kind not in _OTHER_MEDIA:
            raise ValueError(f"{name} has no kind {shown(kind)}; there are {', '.join(KINDS)}")
        # A limit on what is refused in any case asks for nothing.
    return limits
