"""Beam search over one prompt as a state machine over ids and logprobs; the caller reads each query's next token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vllm.params.beam_search import beam_search_score

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that is still growing."""

    token_ids: list[int]  # generated
    cum_logprob: float  # of what `advance` was given for them
    path: list[int]  # for each token, the index of the query that it comes from, among its step's queries


@dataclass(frozen=True, slots=True)
class Hypothesis(Beam):
    """A sequence that has ended, the token that ended it included."""

    score: float  # its beam_search_score
    finish_reason: str  # "stop" or "length"
    stop_reason: int | None  # the stop token id; None for an end-of-sequence token and for "length"


class BeamSearch:
    """The search of one prompt, by the rules of transformers' generate(num_beams=width, do_sample=False).

    A step ranks the continuations of all beams by cumulative logprob. Those among the first `width` that end, by an
    end token or by reaching `max_tokens`, compete with the hypotheses found so far, by score, for `width` places. The
    best `width` that do not end are the next step's beams. When no beam is left, the search is over; when all places
    are taken, it is over

    - early_stopping=True: at once;
    - False: as soon as the best beam, scored at its present length, does not exceed the worst hypothesis;
    - "never": the same, but with a positive length_penalty the beam is scored at the greatest length, an upper bound.

    One beam is greedy search: its first hypothesis is the result. Fewer than `width` hypotheses are found only where
    fewer sequences have a probability above 0. max_tokens is at least 1.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        width: int,
        max_tokens: int,
        eos_token_ids: Iterable[int] = (),
        stop_token_ids: Iterable[int] = (),
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.width = width
        self._prompt = list(prompt_token_ids)
        self._max_tokens = max_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._end_token_ids = self._eos_token_ids | frozenset(stop_token_ids)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping if width > 1 else True
        self._num_steps = 0
        self._beams = [Beam([], 0.0, [])]
        self._ended: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """How many of a query's most likely tokens can matter: `width` that go on, after all that end."""
        return self.width + len(self._end_token_ids)

    @property
    def finished(self) -> bool:
        return not self._beams

    def queries(self) -> list[list[int]]:
        """The sequences, prompt included, whose next token is to be read; at most `width`, none when finished."""
        return [self._prompt + beam.token_ids for beam in self._beams]

    def results(self) -> list[Hypothesis]:
        """The hypotheses found so far, at most `width`, best first."""
        return list(self._ended)

    def latest(self) -> list[Beam]:
        """The beams after the last step: those that go on, and the hypotheses that are kept."""
        return [*self._beams, *(each for each in self._ended if len(each.token_ids) == self._num_steps)]

    def advance(self, candidates: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Take one step with each query's most likely tokens, in any order: integer ids [C] and logprobs [C], with C at
        least `num_candidates` or the vocabulary. -inf excludes a token. ValueError: not one entry a query."""
        ranked = self._ranked(candidates)
        self._num_steps += 1
        is_last = self._num_steps == self._max_tokens
        going_on: list[Beam] = []
        ended: list[Hypothesis] = []
        for rank, (query, token_id, cum_logprob) in enumerate(ranked):
            if rank >= self.width and (is_last or len(going_on) == self.width):
                break
            parent = self._beams[query]
            beam = Beam([*parent.token_ids, token_id], cum_logprob, [*parent.path, query])
            if is_last or token_id in self._end_token_ids:
                if rank < self.width:
                    ended.append(self._end(beam))
            elif len(going_on) < self.width:
                going_on.append(beam)
        # The sort is stable: of equal scores, the one found first keeps its place.
        self._ended = sorted(self._ended + ended, key=lambda each: each.score, reverse=True)[: self.width]
        self._beams = [] if self._is_settled(going_on) else going_on

    def _ranked(self, candidates: Sequence[tuple[np.ndarray, np.ndarray]]) -> Iterable[tuple[int, int, float]]:
        """(query, token id, cumulative logprob) of every possible continuation, most likely first."""
        totals = [
            logprobs.astype(np.float64) + beam.cum_logprob
            for beam, (_, logprobs) in zip(self._beams, candidates, strict=True)
        ]
        total = np.concatenate(totals)
        token_ids = np.concatenate([ids for ids, _ in candidates])
        queries = np.repeat(np.arange(len(totals)), [len(each) for each in totals])
        order = np.argsort(-total, kind="stable")
        order = order[total[order] > -np.inf]
        return zip(queries[order].tolist(), token_ids[order].tolist(), total[order].tolist(), strict=True)

    def _end(self, beam: Beam) -> Hypothesis:
        token_id = beam.token_ids[-1]
        by_stop = token_id in self._end_token_ids
        return Hypothesis(
            beam.token_ids,
            beam.cum_logprob,
            beam.path,
            score=beam_search_score(beam.cum_logprob, len(beam.token_ids), self._length_penalty),
            finish_reason="stop" if by_stop else "length",
            stop_reason=token_id if by_stop and token_id not in self._eos_token_ids else None,
        )

    def _is_settled(self, beams: list[Beam]) -> bool:
        """Whether none of the beams (best first) can change the result."""
        if not beams:
            return True
        if len(self._ended) < self.width:
            return False
        if self._early_stopping is True:
            return True
        bounds_all = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if bounds_all else self._num_steps
        return beam_search_score(beams[0].cum_logprob, length, self._length_penalty) <= self._ended[-1].score
