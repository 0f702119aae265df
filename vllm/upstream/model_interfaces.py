"""Upstream's models describe themselves by these. Models here have none of it: isinstance is False."""

from __future__ import annotations


class VllmModelForTextGeneration:
    """A model that generates."""


class SupportsLoRA:
    """A model that takes adapters."""


class SupportsPP:
    """A model that can be split between layers."""


class SupportsMultiModal:
    """A model that takes media."""


class SupportsTranscription:
    """A model that writes down speech."""


def supports_lora(model: type[object] | object) -> bool:
    """False."""
    return False


def supports_pp(model: type[object] | object) -> bool:
    """False."""
    return False


def supports_multimodal(model: type[object] | object) -> bool:
    """False."""
    return False
