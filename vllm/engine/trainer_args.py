"""The engine's arguments for loops that train what they sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm.engine.arguments import arg


@dataclass(kw_only=True)
class TrainerArgs:
    """How near the engine's logprobs are to a trainer's."""

    rounding: Literal["vllm", "transformers", "autocast"] = arg(
        "vllm",
        "where values are rounded to half precision; transformers: wherever its modules with eager attention do; "
        "autocast: wherever these do under torch.autocast with bfloat16, of float32 weights. Slow, and of "
        "model_impl=transformers alone",
        to="model_config",
    )
