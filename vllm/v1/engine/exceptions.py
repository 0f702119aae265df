"""The engine's errors, under upstream's path."""

from __future__ import annotations

from vllm.exceptions import EngineDeadError, GenerationError


class EngineGenerateError(GenerationError):
    """A request failed, and the engine goes on."""


__all__ = ["EngineDeadError", "EngineGenerateError"]
