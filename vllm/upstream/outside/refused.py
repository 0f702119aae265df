"""Refusals of what models from outside the tree cannot ask for, raised when they are built."""

from __future__ import annotations

from typing import Any


def refuse_quantization(quant_config: Any, prefix: str) -> None:
    """
    Raises:
        ValueError: a layer is to be made of quantised weights.
    """
    if quant_config is not None:
        raise ValueError(
            f"{prefix or 'a layer'}: quant_config={type(quant_config).__name__} is not supported: models from outside "
            "the tree have plain weights; quantise them at the start (quantization='fp8'), or give the architecture a "
            "DecoderSpec (docs/adding_a_model.md)"
        )
