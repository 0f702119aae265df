"""The head, the draw and the readings of recorded decode steps whose rows are all greedy and unprocessed, on the CPU:
recorded at the first of each batch size and width, and replayed after."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vllm.logprobs.lists import WIDEST_TABLE
from vllm.ops.recording import RecordedMemory, Recording
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.replay.recorded_decode import RecordedStep
from vllm.v1.worker.gpu.sample.logprob import Columns, greedy_readings
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import Reads
from vllm.v1.worker.gpu.states import RequestStates

# Recorded logits keep their memory; those of larger batches take what the prompts' leave.
_MOST_LOGITS_BYTES = 16 * 2**20


class _Sampling(NamedTuple):
    """A recording, and what it reads and fills."""

    recording: Recording
    token_ids: Tensor  # int32 [R]
    health: Tensor  # float32 [R]
    columns: Columns | None
    readings: LogprobsTensors | None


class _Plan(NamedTuple):
    """The readings of rows."""

    slots: bytes
    version: int  # of the sampler
    columns: Columns | None  # None: nothing


class RecordedGreedy:
    """Samples by the operators that the sampler calls for such rows, so with the same bits. Steps that read the most
    likely tokens or the entropy, or more columns than a table has, are left to the sampler."""

    def __init__(self, model: Any, sampler: Sampler, states: RequestStates) -> None:
        self._model = model
        self._sampler = sampler
        self._states = states
        self._most_rows = _MOST_LOGITS_BYTES // (4 * sampler.states.vocab_size)
        # Apart from the steps', whose hidden states are read while logits are written.
        self._memory = RecordedMemory()
        self._plan: _Plan | None = None

    def __call__(self, step: RecordedStep, slots: np.ndarray) -> SamplerOutput | None:
        """Sample what `step` has just computed for `slots` (int64 [R]); None: that is left to the sampler. The results
        are valid until the next step."""
        # A function that a caller has put in the method's place is called in every step.
        if len(slots) > self._most_rows or "compute_logits" in vars(self._model):
            return None
        plan = self._plan
        if plan is None or plan.version != self._sampler.version or plan.slots != slots.tobytes():
            plan = self._plan = self._plan_for(step.hidden, slots)
            if plan is None:
                return None
        columns = plan.columns
        key = None if columns is None else (columns.table.shape[1], columns.num_valid is None)
        if key not in step.sampling:
            step.sampling[key] = self._record(step.hidden, columns)
        sampling: _Sampling | None = step.sampling[key]
        if sampling is None:
            return None
        if columns is not None and sampling.columns is not None:
            sampling.columns.table.copy_(columns.table)
            if columns.num_valid is not None and sampling.columns.num_valid is not None:
                sampling.columns.num_valid.copy_(columns.num_valid)
        sampling.recording.replay()
        output = SamplerOutput(sampling.token_ids, sampling.health)
        if columns is not None and sampling.readings is not None and sampling.readings.table is not None:
            # The table of readings outlives the step.
            table = sampling.readings.table.clone()
            readings = sampling.readings._replace(table=table, num_token_ids=columns.num_token_ids)
            output.logprobs.append((range(len(slots)), readings))
        return output

    def _plan_for(self, hidden: Tensor, slots: np.ndarray) -> _Plan | None:
        """The plan of these rows' readings; None: they cannot be replayed. A row that is plain stays so until its slot
        changes."""
        sampler = self._sampler
        if not sampler.is_plain(slots, self._states).all():
            return None
        (kind, *others) = (kind for _, kind in sampler.states.reading_groups(slots, by_mode=False))
        if others or kind & Reads.ENTROPY:
            return None
        columns = sampler.columns.of(hidden, slots) if kind else None
        if columns is not None and (columns.num_topk or columns.table.shape[1] > WIDEST_TABLE):
            return None
        return _Plan(slots.tobytes(), sampler.version, columns)

    def _record(self, hidden: Tensor, columns: Columns | None) -> _Sampling | None:
        """None: an operation cannot be recorded, such as a bound on logits."""
        own, readings = None, None
        if columns is not None:
            num_valid = None if columns.num_valid is None else columns.num_valid.clone()
            own = columns._replace(table=columns.table.clone(), num_valid=num_valid)
        recording = Recording(self._memory)
        with recording:
            logits = self._model.compute_logits(hidden)
            if own is None:
                token_ids, health = self._sampler.vocab.most_likely(logits)
            else:
                token_ids, readings = greedy_readings(logits, own, vocab=self._sampler.vocab)
                health = readings.lse
        return None if recording.missed else _Sampling(recording, token_ids, health, own, readings)
