"""A logits processor that makes a request generate given tokens."""

from __future__ import annotations

import torch

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    """Forces the ids of a request's `forced`, one after the other; what comes behind them is the model's."""

    def is_argmax_invariant(self) -> bool:
        """No."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """For requests with `forced` in extra_args."""
        forced = (params.extra_args or {}).get("forced")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(forced):
                logits[forced[len(output_ids)]] = 1e4
            return logits

        return force
