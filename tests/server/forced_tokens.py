"""A logits processor that makes a request generate given tokens."""

from __future__ import annotations

import torch

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    """Forces the ids of a request's `forced`, one after the other; what comes behind them is the model's. With `obeys`
    those alone that a grammar allows."""

    def is_argmax_invariant(self) -> bool:
        """No."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """For requests with `forced` in extra_args."""
        options = params.extra_args or {}
        forced, obeys = options.get("forced"), options.get("obeys")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            count = len(output_ids)
            if count < len(forced) and not (obeys and logits[forced[count]].isneginf()):
                logits[forced[count]] = 1e4
            return logits

        return force


FORCED = {"max_model_len": 1024, "logits_processors": [ForcedTokens]}
"""Arguments of an engine for answers of some length whose tokens a test chooses."""
