"""The states of requests and their snapshots: rows of the same pools, in the layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm.layers.state import allocate_states, state_layers
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.buffer_utils import upload_all
from vllm.v1.worker.gpu.states import RequestStates
from vllm.v1.worker.state_memory import StateSlots


class StatePools:
    """Rows of a model's pools: first those of the requests' slots, then one for padding, the snapshots, and, where
    tokens are drafted, the backups of the slots."""

    def __init__(self, model: Any, slots: StateSlots, device: torch.device) -> None:
        """Allocates the pools, untouched."""
        self.padding_row = slots.num_requests
        self._first_snapshot = self.padding_row + 1
        self._device = device
        self._first_backup = self._first_snapshot + slots.num_snapshots
        allocate_states(model, self._first_backup + slots.num_backups, device)
        self._num_computed = np.zeros(slots.num_backups, dtype=np.int32)  # [S], tokens of the slots' backups
        self._pools = [pool for layer in state_layers(model) for pool in layer.state]

    def load(self, step: SchedulerOutput, states: RequestStates) -> None:
        """Before the step's forward pass: the states of requests that begin from snapshots."""
        if step.state_loads:
            snapshots, owners = zip(*step.state_loads, strict=True)
            self._copy(self._rows_of(snapshots), self._slots_of(owners, states))

    def save(self, step: SchedulerOutput, states: RequestStates) -> None:
        """After the step's forward pass: its snapshots."""
        if step.state_saves:
            owners, snapshots = zip(*step.state_saves, strict=True)
            self._copy(self._slots_of(owners, states), self._rows_of(snapshots))

    def back_up(self, slots: np.ndarray, states: RequestStates) -> None:
        """Before a step in which the requests of `slots`, int64 [R], have drafts."""
        self._num_computed[slots] = states.num_computed_tokens[slots]
        self._copy(slots, slots + self._first_backup)

    def restore(self, slots: np.ndarray, states: RequestStates) -> None:
        """After such a step, the states of `slots`, int64 [R], before it: their next step computes the tokens again
        that were right."""
        if len(slots):
            states.num_computed_tokens[slots] = self._num_computed[slots]
            self._copy(slots + self._first_backup, slots)

    def _rows_of(self, snapshots: tuple[int, ...]) -> np.ndarray:
        return np.array(snapshots, dtype=np.int64) + self._first_snapshot

    @staticmethod
    def _slots_of(owners: tuple[str, ...], states: RequestStates) -> np.ndarray:
        return np.array([states.req_id_to_slot[each] for each in owners], dtype=np.int64)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        from_rows, to_rows = upload_all([sources, targets], self._device)
        for pool in self._pools:
            pool.index_copy_(0, to_rows, pool.index_select(0, from_rows))
