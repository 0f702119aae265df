"""The engine's arguments of speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config.speculative import SpeculativeConfig, as_speculative_config
from vllm.engine.arguments import arg


@dataclass(kw_only=True)
class SpeculativeArgs:
    """How tokens are drafted: one configuration, and arguments of their own for its usual fields."""

    speculative_config: dict[str, Any] | SpeculativeConfig | None = arg(
        None, 'draft tokens that a step checks, as {"method": "ngram", "num_speculative_tokens": 8}'
    )
    spec_method: str | None = arg(None, "its method: ngram, suffix or draft_model")
    spec_model: str | None = arg(None, "its model: the folder of a draft model")
    spec_tokens: int | None = arg(None, "its num_speculative_tokens")

    def create_speculative_config(self, tensor_parallel_size: int = 1) -> SpeculativeConfig | None:
        """
        Raises:
            ValueError: a field that is not known, or a value that is not done; the message names what to do.
        """
        return as_speculative_config(
            self.speculative_config,
            tensor_parallel_size,
            method=self.spec_method,
            model=self.spec_model,
            num_speculative_tokens=self.spec_tokens,
        )
