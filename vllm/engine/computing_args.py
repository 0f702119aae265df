"""The engine's arguments that say whose code computes, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm.engine.arguments import arg


@dataclass(kw_only=True)
class ComputingArgs:
    """Whose code runs a model, and where it rounds."""

    model_impl: Literal["auto", "vllm", "transformers"] = arg(
        "auto",
        "whose code runs the model: vllm's, transformers', or, with auto, vllm's where it has the architecture",
        to="model_config",
    )
    rounding: Literal["vllm", "transformers", "autocast"] = arg(
        "vllm",
        "where values are rounded to half precision; transformers: wherever its modules with eager attention do; "
        "autocast: wherever these do under torch.autocast with bfloat16, of float32 weights. Slow, and of "
        "model_impl=transformers alone",
        to="model_config",
    )
