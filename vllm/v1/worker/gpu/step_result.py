"""A step's results on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from vllm.logprobs.lists import LogprobsRow
from vllm.v1.outputs import NO_TOKEN, ModelRunnerOutput
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import NON_FINITE_PROMPT, PromptReadings
from vllm.v1.worker.gpu.states import Places, RequestStates


@dataclass
class Sampled:
    """Samples and readings of R requests."""

    slots: np.ndarray  # int64 [R]
    draws: np.ndarray  # bool [R], rows that need the token; the others need readings only
    take_output: Callable[[], SamplerOutput]  # waits until the output is on the host
    places: Places | None  # of reserved tokens; None: tokens are appended when they are known


@dataclass
class StepResult:
    """A dispatched step; see PendingStep."""

    req_ids: list[str]  # of `sampled`, in its order
    silent_req_ids: list[str]  # of requests that are complete and not in `sampled`
    states: RequestStates
    sampled: Sampled | None
    readings: PromptReadings | None
    take_readings_seconds: Callable[[], float]  # called when the results are on the host

    def result(self) -> ModelRunnerOutput:
        """Wait for the results, once. A row with non-finite logits is an error of its request alone."""
        req_ids = self.req_ids + self.silent_req_ids
        token_ids = np.full(len(req_ids), NO_TOKEN, dtype=np.int32)
        logprobs: list[LogprobsRow | None] = [None] * len(req_ids)
        errors: dict[str, str] = {}
        if self.sampled is not None:
            sampled = self.sampled.take_output()
            self._take_sampled(self.sampled, sampled, token_ids, logprobs)
            errors = {self.req_ids[row]: message for row, message in sampled.errors().items()}
        output = ModelRunnerOutput(req_ids, token_ids, logprobs)
        if self.readings is not None:
            output.prompt_logprobs = self.readings.rows
            errors.update(dict.fromkeys(self.readings.non_finite, NON_FINITE_PROMPT))
        if errors:
            output = output.without(errors)
            output.errors = {req_id: f"request {req_id}: {message}" for req_id, message in errors.items()}
        output.readings_seconds = self.take_readings_seconds()
        return output

    def _take_sampled(
        self, sampled: Sampled, output: SamplerOutput, token_ids: np.ndarray, logprobs: list[LogprobsRow | None]
    ) -> None:
        """Put the tokens into the request states and, with the readings, into the step's output."""
        drawn, draws, states = output.sampled_token_ids.numpy(), sampled.draws, self.states
        token_ids[: len(drawn)] = np.where(draws, drawn, np.int32(NO_TOKEN))
        for rows, tensors in output.logprobs:
            readings = zip(repeat(tensors.tolists()), range(len(rows)), strict=False)
            if isinstance(rows, range):
                logprobs[rows.start : rows.stop] = readings
                continue
            for row, reading in zip(rows, readings, strict=True):
                if row >= 0:
                    logprobs[row] = reading
        if sampled.places is not None:
            states.fill(sampled.places, drawn[draws])
        elif draws.all():
            states.append_sampled(sampled.slots, drawn)
        else:
            states.append_sampled(sampled.slots[draws], drawn[draws])
