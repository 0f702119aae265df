"""The sampler's first stage, which a guest may fill: what is forbidden whatever else changes the logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm.v1.worker.gpu.states import RequestStates


class AllowedMass(NamedTuple):
    """The raw model's probability of what a mask allows."""

    rows: list[int]
    logs: Tensor  # float32 [len(rows)], its logarithm, in nats


class Masks:
    """Masks of slots; here, of none."""

    @property
    def in_use(self) -> bool:
        """Whether any slot has one."""
        return False

    def uses(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: rows that have one."""
        return np.zeros(len(slots), dtype=bool)

    def apply(
        self, logits: Tensor, slots: np.ndarray, states: RequestStates
    ) -> tuple[dict[int, str], AllowedMass | None]:
        """Set what is forbidden to -inf, in place, before anything else has changed the logits, float32 [R, V]. Returns
        row -> why its request cannot go on, and what is allowed of rows that read it."""
        return {}, None

    def ending(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: rows that `apply` left nothing but an end, which min_tokens must not forbid, then."""
        return np.zeros(len(slots), dtype=bool)
