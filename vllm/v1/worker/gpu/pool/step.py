"""The result of a pooling model's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm.v1.outputs import NO_TOKEN, ModelRunnerOutput
from vllm.v1.worker.gpu.guests import Completion, StepOutcome

_NON_FINITE = "the model's result is not finite (NaN or infinity)"


@dataclass
class PooledStep:
    """A dispatched step; see PendingStep. `pooled`: by request."""

    pooled: dict[str, Tensor]
    completions: Sequence[Completion] = ()  # of guests, in their order

    def result(self) -> ModelRunnerOutput:
        """Wait for the results. One that is not finite is an error of its request alone."""
        pooled = {req_id: tensor.cpu().contiguous() for req_id, tensor in self.pooled.items()}
        broken = [req_id for req_id, tensor in pooled.items() if not tensor.isfinite().all()]
        count = len(pooled)
        tokens = np.full(count, NO_TOKEN, dtype=np.int32)
        output = ModelRunnerOutput(list(pooled), tokens, [None] * count, pooled=pooled)
        outcome = StepOutcome(output, None, {}, set(broken))
        for complete in self.completions:
            complete(outcome)
        if broken:
            output = output.without(broken)
            output.errors = {req_id: f"request {req_id}: {_NON_FINITE}" for req_id in broken}
        return output
