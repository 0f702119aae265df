"""Finds guests of the engine."""

from __future__ import annotations

from typing import Any


def guest_of(spine: Any, kind: type) -> Any:
    """The guest of this class of a scheduler or a runner; None: it has none."""
    return next((guest for guest in spine.guests if isinstance(guest, kind)), None)
