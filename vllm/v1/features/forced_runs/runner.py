"""Appends forced tokens to the slots, and reads them like a prompt's where their request reads what it generates."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.features.forced_runs.scheduler import StepRuns
from vllm.v1.features.grammars.runner import GrammarMasks
from vllm.v1.worker.gpu.guests import Completion, RunnerGuest, Samples, StepOutcome
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.prompt_logprob import (
    NON_FINITE_RUN,
    PromptLogprobsState,
    PromptReadings,
    PromptRows,
)

# On a CPU a token of a larger batch takes the same time in one step or in several.
MOST_ROWS = 4


class ForcedRuns(RunnerGuest):
    """After each draw of a request with a grammar, the tokens that follow without a choice."""

    def __init__(self, runner: Any, grammars: GrammarMasks) -> None:
        self._runner, self._states, self._grammars = runner, runner.states, grammars
        vocab_size = runner.model_config.vocab_size
        self._readings = PromptLogprobsState(self._states.max_num_reqs, vocab_size, runner.sampler.vocab)
        # By slot, the requests that read what they generate.
        self._readers: dict[int, tuple[str, SamplingParams]] = {}
        # The positions that the step reads: slots, positions and the step's tokens, each int64 [P].
        self._rows: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def remove(self, slot: int) -> None:
        self._readings.remove_request(slot)
        self._readers.pop(slot, None)

    def add(self, slot: int, new: NewRequestData, step: SchedulerOutput) -> None:
        params = new.sampling_params
        if params.grammar is not None and params.reads_generated:
            self._readers[slot] = new.req_id, params

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        self._rows = None
        if self._readings.is_idle:
            return
        batch.need_hidden(np.flatnonzero(self._readings.reads(batch.token_slots_np, batch.positions_np)))
        slots = batch.idx_mapping_np
        index, positions = self._readings.take_rows(slots, batch.num_computed_np, batch.seq_lens_np)
        self._rows = slots[index], positions, batch.origins_np[index] + positions

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        readings = None if self._rows is None else self._read(batch, hidden, *self._rows)
        # Host code that observes every sampled row sees no others.
        appends = self._grammars.in_use and not self._runner.sampler.is_followed
        if readings is None and not appends:
            return None

        def complete(outcome: StepOutcome) -> None:
            runs = StepRuns()
            outcome.output.parts.add(runs)
            if readings is not None:
                readings.take()
                runs.readings = readings.rows
                outcome.errors.update(dict.fromkeys(readings.non_finite, NON_FINITE_RUN))
                outcome.unsound.update(readings.non_finite)
            if appends and outcome.sampled is not None:
                runs.appended = outcome.by_request(self._append(outcome.sampled))

        return complete

    def _read(
        self, batch: InputBatch, hidden: Tensor, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray
    ) -> PromptReadings:
        readings = PromptReadings(self._runner.host_copies)
        if len(slots):
            rows = PromptRows(slots, positions, np.searchsorted(batch.hidden_rows_np, tokens))
            compute_logits, weight = self._runner.head()
            self._readings.read(hidden, rows, compute_logits, weight, self._states, readings)
            self._readings.remove_read(np.unique(slots))
        return readings

    def _append(self, sampled: Samples) -> dict[int, list[int]]:
        """By index into the samples, what follows them."""
        if self._states.device.type == "cpu" and len(sampled.slots) > MOST_ROWS:
            return {}
        # Skip slots that have been reused since.
        rows = np.flatnonzero(sampled.draws & (self._states.owners[sampled.slots] == sampled.owners))
        runs = self._grammars.forced_runs(sampled.slots[rows], self._states)
        found = {}
        for index, run in runs.items():
            slot = int(sampled.slots[rows[index]])
            start = int(self._states.total_len[slot])
            self._states.append_run(slot, run)
            if slot in self._readers:
                self._readings.add_run(slot, *self._readers[slot], start - 1, start - 1 + len(run))
            found[int(rows[index])] = run
        return found
