"""The result of a dispatched step when it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from vllm.v1.outputs import NO_TOKEN, NO_TOKEN_MESSAGE, ModelRunnerOutput
from vllm.v1.worker.gpu.guests import Completion, Samples, StepOutcome
from vllm.v1.worker.gpu.sample.logprob import ReadingClock
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
    owners: np.ndarray  # int64 [R], the numbers of the slots' requests

    def judged(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See Samples: no request had tokens that were not certain."""
        return self.slots[:0], np.zeros(0, np.int32), np.zeros(0, np.int32)

    def put_into(self, output: ModelRunnerOutput, states: RequestStates) -> dict[int, str]:
        """Wait for the results, and put tokens and readings into the states and into the step's output, whose first R
        requests these are. Returns the errors by their number."""
        sampled = self.take_output()
        for rows, tensors in sampled.beam_scores:
            lists = tensors.tolists()
            output.beam_scores.update({output.req_ids[row]: (lists, index) for index, row in enumerate(rows)})
        if (allowed := sampled.allowed_mass) is not None:
            of_rows = zip(allowed.rows, allowed.logs.tolist(), strict=True)
            output.allowed_mass = {output.req_ids[row]: log_mass for row, log_mass in of_rows}
        drawn, draws = sampled.sampled_token_ids.numpy(), self.draws
        all_draw = draws.all()
        output.sampled_token_ids[: len(drawn)] = drawn if all_draw else np.where(draws, drawn, np.int32(NO_TOKEN))
        for rows, tensors in sampled.logprobs:
            readings = zip(repeat(tensors.tolists()), range(len(rows)), strict=False)
            if isinstance(rows, range):
                output.logprobs[rows.start : rows.stop] = readings
                continue
            for row, reading in zip(rows, readings, strict=True):
                if row >= 0:
                    output.logprobs[row] = reading
        if self.places is not None:
            states.fill(self.places, drawn[draws])
        elif all_draw:
            states.append_sampled(self.slots, drawn)
        else:
            states.append_sampled(self.slots[draws], drawn[draws])
        return sampled.errors()


@dataclass
class StepResult:
    """A dispatched step; see PendingStep."""

    req_ids: list[str]  # of `sampled`, in its order
    silent_req_ids: list[str]  # of requests that are complete and not in `sampled`
    states: RequestStates
    sampled: Samples | None
    readings: PromptReadings | None
    reading_clocks: Sequence[ReadingClock]
    completions: Sequence[Completion] = ()  # of guests, in their order

    def result(self) -> ModelRunnerOutput:
        """Wait for the results, once. A row with non-finite logits is an error of its request alone."""
        req_ids = self.req_ids + self.silent_req_ids
        token_ids = np.full(len(req_ids), NO_TOKEN, dtype=np.int32)
        output = ModelRunnerOutput(req_ids, token_ids, [None] * len(req_ids))
        errors: dict[str, str] = {}
        if self.sampled is not None:
            errors = {req_ids[row]: message for row, message in self.sampled.put_into(output, self.states).items()}
        # Tokens that were drawn before an error are returned.
        unsound = set(errors.keys() - output.following.keys())
        if self.readings is not None:
            self.readings.take()
            output.prompt_logprobs = self.readings.rows
            errors.update(dict.fromkeys(self.readings.non_finite, NON_FINITE_PROMPT))
            unsound |= self.readings.non_finite
        if self.completions:
            outcome = StepOutcome(output, self.sampled, errors, unsound)
            for complete in self.completions:
                complete(outcome)
        if errors or unsound:
            exhausted = {req_id for req_id, message in errors.items() if message == NO_TOKEN_MESSAGE}
            # Everything is known of the prompt where only the constraints leave nothing.
            of_prompts = {req_id: rows for req_id, rows in output.prompt_logprobs.items() if req_id in exhausted}
            output = output.without(unsound)
            output.exhausted = exhausted
            output.prompt_logprobs |= of_prompts
            output.errors = {req_id: f"request {req_id}: {message}" for req_id, message in errors.items()}
        # The results are on the host, so all timed work is done.
        output.readings_seconds = sum(clock.take() for clock in self.reading_clocks)
        return output
