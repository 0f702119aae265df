"""Configurations as transformers has them, for callers: the engine itself reads config.json without transformers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig


def get_config(
    model: str | Path, trust_remote_code: bool = False, revision: str | None = None, **kwargs: Any
) -> PretrainedConfig:
    """A model's configuration, as AutoConfig reads it."""
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(
        model, trust_remote_code=trust_remote_code, revision=revision, **kwargs
    )
    return config


def get_hf_text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of it that is of text; the whole where there is no other."""
    found: PretrainedConfig = config.get_text_config()
    return found


def try_get_generation_config(
    model: str, trust_remote_code: bool = False, revision: str | None = None
) -> GenerationConfig | None:
    """The contents of its generation_config.json, or else its configuration; None: neither can be read."""
    from transformers import GenerationConfig

    with contextlib.suppress(OSError):
        return GenerationConfig.from_pretrained(model, revision=revision or "main")
    with contextlib.suppress(OSError):
        return GenerationConfig.from_model_config(get_config(model, trust_remote_code, revision))
    return None
