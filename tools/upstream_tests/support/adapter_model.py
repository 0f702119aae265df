"""The adapter that takes the place of upstream's."""

from __future__ import annotations

from pathlib import Path

import transformers
from tiny_adapters import make_adapter


def make_adapter_of(model: Path, folder: Path) -> Path:
    """A random adapter of a model's linears, of rank 8."""
    return make_adapter(folder, transformers.AutoModelForCausalLM.from_pretrained(model), rank=8)
