"""Borders inside the engine: what the sampler and the model runner hand upwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.logprobs import LogprobsLists, LogprobsRow

if TYPE_CHECKING:
    import torch

__all__ = ["LogprobsLists", "LogprobsRow", "LogprobsTensors", "ModelRunnerOutput"]


class LogprobsTensors(NamedTuple):
    """Readings of L logits rows on the device. Columns: the sampled token, K top-k entries, up to M requested ids.
    Cells that a row did not ask for hold 0."""

    logprob_token_ids: torch.Tensor  # int32 [L, 1 + K + M]
    logprobs: torch.Tensor  # float32 [L, 1 + K + M]
    selected_token_ranks: torch.Tensor  # int32 [L], the sampled token's rank
    cu_num_generated_tokens: list[int] | None  # row bounds of each request when it has several rows
    logits: torch.Tensor  # float32 [L, 1 + K + M]
    ranks: torch.Tensor  # int32 [L, 1 + K + M]
    lse: torch.Tensor  # float32 [L]
    num_topk: int  # K
    num_token_ids: torch.Tensor | None = None  # int32 [L], valid ids among the last M columns; None: M == 0

    def tolists(self) -> LogprobsLists:
        """The same readings as numpy arrays on the host."""
        return LogprobsLists(
            self.logprob_token_ids.cpu().numpy(),
            self.logprobs.cpu().numpy(),
            self.logits.cpu().numpy(),
            self.ranks.cpu().numpy(),
            self.lse.cpu().numpy(),
            self.num_topk,
        )


@dataclass
class ModelRunnerOutput:
    """What one step produced, for the R requests that sampled a token in it, in batch order."""

    req_ids: list[str]
    sampled_token_ids: np.ndarray  # int32 [R]
    logprobs: list[LogprobsRow | None]  # one a request; None = it asked for no readings
    errors: dict[str, str] = field(default_factory=dict)  # request id -> why it got no token
