"""Verification: which drafted tokens are what would have been drawn without them.

Noise is a function of the request's seed, the position and the token. So the token of each expanded row is drawn as it
would be without speculation, and a draft is right while it equals what is drawn: a drafted token is accepted with the
probability that the model gives it, otherwise another one is drawn from the rest, whoever drafted it. What is read of a
row is what is read without speculation, too.

Rows whose processing depends on the tokens before them are drawn in rounds, each after the tokens of the one before:
no state follows a token that is not accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm.logprobs.lists import LogprobsRow
from vllm.v1.outputs import FollowingTokens, ModelRunnerOutput
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestStates

NO_DRAFT = -1

Start = Callable[[SamplerOutput], Callable[[], SamplerOutput]]
"""Begins the copy of an output to the host; the result waits for it."""


class ExpandedRows(NamedTuple):
    """L logits rows of N requests: of each one more than it has drafts."""

    slots: np.ndarray  # int64 [N], distinct
    cu_num_logits: np.ndarray  # int64 [N + 1], the bounds of each request's rows
    expanded_idx_mapping: np.ndarray  # int64 [L], slots
    lengths: np.ndarray  # int32 [L], tokens before the one that a row draws
    drafts: np.ndarray  # int32 [L], what a row must draw for the next one to count; NO_DRAFT in a request's last


def expand(slots: np.ndarray, num_drafts: np.ndarray, states: RequestStates) -> ExpandedRows:
    """The rows of requests whose drafts, `num_drafts` of each (int32 [N]), stand after their tokens in `states`."""
    counts = num_drafts.astype(np.int64) + 1
    bounds = np.zeros(len(slots) + 1, dtype=np.int64)
    np.cumsum(counts, out=bounds[1:])
    mapping = np.repeat(slots, counts)
    steps = np.arange(bounds[-1]) - np.repeat(bounds[:-1], counts)
    lengths = states.total_len[mapping] + steps.astype(np.int32)
    drafts = states.token_ids[mapping, lengths]
    drafts[bounds[1:] - 1] = NO_DRAFT
    return ExpandedRows(slots, bounds, mapping, lengths, drafts)


@dataclass
class VerifiedSamples:
    """The samples and readings of expanded rows; used as Sampled."""

    rows: ExpandedRows
    rounds: list[tuple[np.ndarray, Callable[[], SamplerOutput]]]  # expanded rows (int64), and their results
    draws: np.ndarray  # bool [N], requests that need the tokens; the others need readings only
    num_accepted: np.ndarray  # int32 [N], how many of a request's drafts are right; known from `put_into` on
    owners: np.ndarray  # int64 [N], the numbers of the slots' requests

    @property
    def slots(self) -> np.ndarray:
        return self.rows.slots

    def judged(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Requests with drafts: slots, int64, the number of drafts and that of the right ones, both int32."""
        drafted = np.diff(self.rows.cu_num_logits).astype(np.int32) - 1
        chosen = drafted > 0
        return self.slots[chosen], drafted[chosen], self.num_accepted[chosen]

    def put_into(self, output: ModelRunnerOutput, states: RequestStates) -> dict[int, str]:
        """Append the tokens to the requests in `states`, and put them, with the readings, into the output, whose first
        N requests these are. Returns the errors by their number; what precedes an error counts."""
        found = _Results(self.rows)
        for rows, take_output in self.rounds:
            found.add(rows, take_output())
        errors, bounds = {}, self.rows.cu_num_logits.tolist()
        for index, (start, end) in enumerate(pairwise(bounds)):
            self.num_accepted[index] = found.num_accepted(start, end)
            stop = start + int(self.num_accepted[index]) + 1
            failed = [row for row in range(start, stop) if row in found.errors]
            if failed:
                errors[index], stop = found.errors[failed[0]], failed[0]
            if stop > start:
                self._put_request(index, start, stop, found, output)
                if failed:
                    output.following.setdefault(output.req_ids[index], FollowingTokens([], [], []))
            if self.draws[index]:
                self._append(index, start, stop, end, found, states)
        return errors

    def _put_request(self, index: int, start: int, stop: int, found: _Results, output: ModelRunnerOutput) -> None:
        req_id = output.req_ids[index]
        output.logprobs[index] = found.logprobs[start]
        if self.draws[index]:
            output.sampled_token_ids[index] = found.token_ids[start]
        if start in found.beam_scores:
            output.beam_scores[req_id] = found.beam_scores[start]
        if start in found.allowed_mass:
            output.allowed_mass[req_id] = found.allowed_mass[start]
        if stop > start + 1:
            later = range(start + 1, stop)
            output.following[req_id] = FollowingTokens(
                found.token_ids[start + 1 : stop].tolist(),
                [row for each in later if (row := found.logprobs[each]) is not None],
                [found.allowed_mass[each] for each in later if each in found.allowed_mass],
            )

    def _append(self, index: int, start: int, stop: int, end: int, found: _Results, states: RequestStates) -> None:
        """Where tokens were drawn in rounds, they are there already."""
        slot, first = self.rows.slots[index], self.rows.lengths[start]
        states.token_ids[slot, first : first + stop - start] = found.token_ids[start:stop]
        states.total_len[slot] = first + stop - start
        if end > start + 1:
            # The last token has no keys and values yet; those of rejected drafts are written over.
            states.num_computed_tokens[slot] = first + stop - start - 1


class _Results:
    """The results of L expanded rows, on the host."""

    def __init__(self, rows: ExpandedRows) -> None:
        num_rows = len(rows.drafts)
        self._drafts = rows.drafts
        self.token_ids = np.full(num_rows, NO_DRAFT - 1, dtype=np.int32)  # [L], no draft's where none was drawn
        self.logprobs: list[LogprobsRow | None] = [None] * num_rows
        self.beam_scores: dict[int, LogprobsRow] = {}
        self.allowed_mass: dict[int, float] = {}
        self.errors: dict[int, str] = {}

    def add(self, rows: np.ndarray, output: SamplerOutput) -> None:
        """`rows`, int64, are the expanded rows of the output's."""
        names = rows.tolist()
        self.token_ids[rows] = output.sampled_token_ids.numpy()
        for members, tensors in output.logprobs:
            lists = tensors.tolists()
            for index, row in enumerate(members):
                if row >= 0:
                    self.logprobs[names[row]] = lists, index
        for members, tensors in output.beam_scores:
            lists = tensors.tolists()
            self.beam_scores |= {names[row]: (lists, index) for index, row in enumerate(members)}
        if output.allowed_mass is not None:
            logs = output.allowed_mass.logs.tolist()
            self.allowed_mass |= {names[row]: log for row, log in zip(output.allowed_mass.rows, logs, strict=True)}
        self.errors |= {names[row]: message for row, message in output.errors().items()}

    def num_accepted(self, start: int, end: int) -> int:
        """How many of the drafts of the request with the rows [start, end) are right."""
        wrong = self.token_ids[start:end] != self._drafts[start:end]
        return int(wrong.argmax())  # the last one always is


def verify(
    sampler: Sampler, logits: Tensor, rows: ExpandedRows, states: RequestStates, start: Start | None
) -> VerifiedSamples:
    """Draw and read the expanded rows of `logits`, [L, V]. `start`: None on the CPU. Waits for the device where rows
    depend on those before them."""
    bounds, mapping = rows.cu_num_logits, rows.expanded_idx_mapping
    in_rounds = (np.diff(bounds) > 1) & (sampler.is_followed or sampler.depends_on_history(rows.slots, states))
    current = bounds[:-1][in_rounds]  # the rows of requests that are drawn one by one
    is_drawn = np.ones(len(mapping), dtype=bool)
    is_drawn[np.repeat(in_rounds, np.diff(bounds))] = False
    is_drawn[current] = True
    chosen = np.flatnonzero(is_drawn)
    rounds: list[tuple[np.ndarray, Callable[[], SamplerOutput]]] = []
    while len(chosen):
        part = logits if len(chosen) == len(mapping) else logits.index_select(0, upload(chosen, logits.device))
        output = sampler(part, mapping[chosen], states, rows.lengths[chosen])
        take_output = _of(output) if start is None else start(output)
        if len(current):
            output = take_output()
            take_output = _of(output)
            token_ids = output.sampled_token_ids.numpy()[np.searchsorted(chosen, current)]
            states.append_sampled(mapping[current], token_ids)
            # Errors do not end a round: some are known to one rank alone.
            current = current[token_ids == rows.drafts[current]] + 1
        rounds.append((chosen, take_output))
        chosen = current
    return _samples(rows, rounds, states)


def verified(rows: ExpandedRows, output: SamplerOutput, states: RequestStates) -> VerifiedSamples:
    """Join what all expanded rows have drawn and read, on the host."""
    return _samples(rows, [(np.arange(len(rows.drafts)), _of(output))], states)


def _samples(
    rows: ExpandedRows, rounds: list[tuple[np.ndarray, Callable[[], SamplerOutput]]], states: RequestStates
) -> VerifiedSamples:
    num_accepted = np.zeros(len(rows.slots), dtype=np.int32)
    return VerifiedSamples(rows, rounds, states.samples[rows.slots], num_accepted, states.owners[rows.slots])


def _of(output: SamplerOutput) -> Callable[[], SamplerOutput]:
    return lambda: output
