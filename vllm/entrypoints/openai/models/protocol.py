"""What a server calls its models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BaseModelPath:
    """The model: `name` is what requests call it."""

    name: str
    model_path: str


@dataclass
class LoRAModulePath:
    """An adapter. None is served."""

    name: str
    path: str
    base_model_name: str | None = None
