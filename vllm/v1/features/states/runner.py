"""Recurrent states in the worker: rows of the layers' pools, and the snapshots and backups that are copied to and from
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.layers.state import allocate_states, state_layers
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.states.memory import StateSlots
from vllm.v1.features.states.scheduler import StepStates
from vllm.v1.worker.gpu.buffer_utils import upload_all
from vllm.v1.worker.gpu.guests import CacheSizes, Completion, RunnerGuest, StepOutcome
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestStates


class States(RunnerGuest):
    """Loads and saves snapshots around a forward pass, and takes states back that have taken wrong tokens."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._states = runner, runner.states
        self.pools: StatePools | None = None

    def reset(self, sizes: CacheSizes) -> None:
        model, device = self._runner.model, self._runner.device
        self.pools = None
        if sizes.num_blocks and not sizes.is_scratch:
            self.pools = StatePools(model, sizes.state_slots, device)
        else:
            # In a scratch cache all requests have one state.
            allocate_states(model, sizes.num_blocks, device)

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        if self.pools is None:
            batch.state_slots_np = np.zeros_like(batch.idx_mapping_np)
            return
        self.pools.load(step, self._states)
        if batch.expanded_np is not None:
            rows, num_tentative = batch.expanded_np
            self.pools.back_up(batch.idx_mapping_np[rows[num_tentative > 0]], self._states)

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        if self.pools is not None:
            self.pools.save(step, self._states)

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        return None if batch.expanded_np is None else self._take_back_wrong

    def _take_back_wrong(self, outcome: StepOutcome) -> None:
        if outcome.sampled is not None:
            slots, tentative, right = outcome.sampled.judged()
            self.take_back(slots[right < tentative])

    def take_back(self, slots: np.ndarray) -> None:
        """The last drafts of `slots`, int64 [R], were not all right."""
        if self.pools is not None:
            self.pools.restore(slots, self._states)


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
        part = step.parts.of(StepStates)
        if part is not None and part.loads:
            snapshots, owners = zip(*part.loads, strict=True)
            self._copy(self._rows_of(snapshots), self._slots_of(owners, states))

    def save(self, step: SchedulerOutput, states: RequestStates) -> None:
        """After the step's forward pass: its snapshots."""
        part = step.parts.of(StepStates)
        if part is not None and part.saves:
            owners, snapshots = zip(*part.saves, strict=True)
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

    @property
    def layout(self) -> list[list[Any]]:
        """The dtype and the shape of each part of a state."""
        return [[str(pool.dtype), list(pool.shape[1:])] for pool in self._pools]

    @property
    def state_bytes(self) -> int:
        """The size of a state."""
        return sum(pool[0].nbytes for pool in self._pools)

    def bytes_of(self, snapshot: int) -> Tensor:
        """A snapshot's state: all parts, one after the other, uint8 [size], a copy."""
        row = self._first_snapshot + snapshot
        return torch.cat([pool[row].reshape(-1).view(torch.uint8).cpu() for pool in self._pools])

    def put_bytes(self, snapshot: int, state: Tensor) -> None:
        """The inverse of `bytes_of`."""
        row, begin = self._first_snapshot + snapshot, 0
        for pool in self._pools:
            target = pool[row]
            part = state[begin : begin + target.nbytes].clone().view(pool.dtype)
            target.copy_(part.view(target.shape))
            begin += target.nbytes

    def _rows_of(self, snapshots: Sequence[int]) -> np.ndarray:
        return np.array(snapshots, dtype=np.int64) + self._first_snapshot

    @staticmethod
    def _slots_of(owners: tuple[str, ...], states: RequestStates) -> np.ndarray:
        return np.array([states.req_id_to_slot[each] for each in owners], dtype=np.int64)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        from_rows, to_rows = upload_all([sources, targets], self._device)
        for pool in self._pools:
            pool.index_copy_(0, to_rows, pool.index_select(0, from_rows))
