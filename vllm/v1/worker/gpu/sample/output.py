"""The sampler's result for the model runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.v1.outputs import NO_TOKEN_MESSAGE, LogprobsTensors


class AllowedMass(NamedTuple):
    """The raw model's probability of what a mask allows."""

    rows: list[int]
    logs: Tensor  # float32 [len(rows)], its logarithm, in nats


@dataclass
class SamplerOutput:
    """Results of L logits rows, on the device, perhaps not computed yet."""

    sampled_token_ids: Tensor  # int32 [L]
    health: Tensor  # float32 [L]; NaN or +inf: the model's logits are not finite; -inf: no token was left; else sound
    # Groups of (rows, their readings in that order). A row is in one group, or in none if it reads nothing. Row -1 is
    # padding.
    logprobs: list[tuple[Sequence[int], LogprobsTensors]] = field(default_factory=list)
    # The same, as second readings: the scores of beams' candidates, in rows whose logits were processed.
    beam_scores: list[tuple[Sequence[int], LogprobsTensors]] = field(default_factory=list)
    allowed_mass: AllowedMass | None = None  # of rows that read what their grammar allows
    # bool [L]; finite rows in which a logits processor left NaN or +inf. None: none ran.
    corrupted: Tensor | None = None
    processor_errors: dict[int, str] = field(default_factory=dict)  # row -> how its logits processor failed

    @classmethod
    def failed(cls, num_rows: int, device: torch.device, message: str) -> SamplerOutput:
        """A step of which no row can be used."""
        token_ids, health = (
            torch.zeros(num_rows, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32)
        )
        return cls(token_ids, health, processor_errors=dict.fromkeys(range(num_rows), message))

    def moved(self, move: Callable[[Tensor], Tensor]) -> SamplerOutput:
        """A copy in which `move` has moved what is read on the host."""
        return replace(
            self,
            sampled_token_ids=move(self.sampled_token_ids),
            health=move(self.health),
            logprobs=[(rows, tensors.moved(move)) for rows, tensors in self.logprobs],
            beam_scores=[(rows, tensors.moved(move)) for rows, tensors in self.beam_scores],
            allowed_mass=None
            if self.allowed_mass is None
            else self.allowed_mass._replace(logs=move(self.allowed_mass.logs)),
            corrupted=None if self.corrupted is None else move(self.corrupted),
        )

    def errors(self) -> dict[int, str]:
        """Row -> why its token and readings must not be used. Waits for the device."""
        health = self.health.cpu().numpy()
        finite = np.isfinite(health)
        errors = {}
        if not finite.all():
            errors = {
                int(row): NO_TOKEN_MESSAGE if health[row] == -np.inf else _NON_FINITE for row in np.flatnonzero(~finite)
            }
        if self.corrupted is not None:
            errors.update(dict.fromkeys(np.flatnonzero(self.corrupted.cpu().numpy()).tolist(), _CORRUPTED))
        return errors | self.processor_errors


_CORRUPTED = "a logits processor left NaN or infinity among the logits, so no token can be sampled"
_NON_FINITE = "the model's logits are not finite (NaN or infinity), so no token can be sampled"
