"""Settings of loading weights."""

from __future__ import annotations

from typing import Any

LOAD_FORMATS = ("auto", "dummy")
OTHER_FORMATS: set[str] = set()
"""The formats of loaders that callers registered in this process."""
SAME_AS_AUTO = ("safetensors", "hf", "gguf", "pt", "bitsandbytes")
"""Upstream's values for what is found out anyway."""


def resolve_load_format(name: Any, quantization: str | None = "bitsandbytes") -> str:
    """One of LOAD_FORMATS. `quantization`: the model's, once it is known. ValueError: it is none of upstream's values
    for these, or not the model's."""
    if name in OTHER_FORMATS:
        return str(name)
    known = str(getattr(name, "value", name)).lower()
    if known not in (*LOAD_FORMATS, *SAME_AS_AUTO):
        others = sorted(OTHER_FORMATS)
        raise ValueError(
            f"load_format must be one of {', '.join((*LOAD_FORMATS, *SAME_AS_AUTO, *others))}, got {name!r}"
        )
    if known == "bitsandbytes" != quantization:
        raise ValueError(
            "load_format='bitsandbytes', but the model is no checkpoint of bitsandbytes: use one, or "
            "quantization='int4', which rounds the weights of any unquantised model"
        )
    return "auto" if known in SAME_AS_AUTO else known


def reads_folder(load_format: Any) -> bool:
    """Whether the weights are those of the model's folder."""
    return load_format != "dummy" and load_format not in OTHER_FORMATS
