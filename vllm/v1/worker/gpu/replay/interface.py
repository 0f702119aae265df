"""The interface of replays, which is all that the runner knows of them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput


class Replay:
    """The steps of a model that can be replayed. This class has none."""

    def takes(self, batch: InputBatch) -> bool:
        """Whether the forward pass of `batch` can be replayed, or recorded now."""
        return False

    def forward(self, batch: InputBatch) -> Tensor:
        """Final hidden states of `batch.hidden_rows_np`, [M, H], of a batch that it takes; valid until the next step,
        whose results may overwrite them."""
        raise NotImplementedError

    def sample(self, batch: InputBatch, slots: np.ndarray) -> SamplerOutput | None:
        """Sample all tokens of a batch that `forward` has just computed, of the requests in `slots`, int64 [L]; None:
        the sampler does. The results are valid until the next step."""
        return None
