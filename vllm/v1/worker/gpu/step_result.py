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
    """What was drawn and read of R requests.

    Attributes:
        slots: int64 [R].
        draws: bool [R], whose token counts: the others only read.
        take_output: waits until it is on the host, and gives it.
        places: of the tokens, when they were reserved; None: they are appended when they come.
    """

    slots: np.ndarray
    draws: np.ndarray
    take_output: Callable[[], SamplerOutput]
    places: Places | None


class StepResult:
    """A step that has begun; see PendingStep."""

    def __init__(
        self,
        req_ids: list[str],
        silent_req_ids: list[str],
        states: RequestStates,
        sampled: Sampled | None,
        readings: PromptReadings | None,
        take_readings_seconds: Callable[[], float],
    ) -> None:
        """
        Args:
            req_ids: of `sampled`, in its order.
            silent_req_ids: of requests that are complete and have no row there.
            readings: of prompts.
            take_readings_seconds: asked when the results are there.
        """
        self._req_ids = req_ids
        self._silent_req_ids = silent_req_ids
        self._states = states
        self._sampled = sampled
        self._readings = readings
        self._take_readings_seconds = take_readings_seconds

    def result(self) -> ModelRunnerOutput:
        """Wait for the results, once. A row whose logits are non_finite is an error of its request alone."""
        req_ids = self._req_ids + self._silent_req_ids
        token_ids = np.full(len(req_ids), NO_TOKEN, dtype=np.int32)
        logprobs: list[LogprobsRow | None] = [None] * len(req_ids)
        errors: dict[str, str] = {}
        if self._sampled is not None:
            sampled = self._sampled.take_output()
            self._take_sampled(self._sampled, sampled, token_ids, logprobs)
            errors = {self._req_ids[row]: message for row, message in sampled.errors().items()}
        output = ModelRunnerOutput(req_ids, token_ids, logprobs)
        if self._readings is not None:
            output.prompt_logprobs = self._readings.rows
            errors.update(dict.fromkeys(self._readings.non_finite, NON_FINITE_PROMPT))
        if errors:
            output = output.without(errors)
            output.errors = {req_id: f"request {req_id}: {message}" for req_id, message in errors.items()}
        # The results are on the host: what was timed is over.
        output.readings_seconds = self._take_readings_seconds()
        return output

    def _take_sampled(
        self, sampled: Sampled, output: SamplerOutput, token_ids: np.ndarray, logprobs: list[LogprobsRow | None]
    ) -> None:
        """Put the tokens into the request states and, with the readings, into the step's output."""
        drawn, draws, states = output.sampled_token_ids.numpy(), sampled.draws, self._states
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
