"""When to draft, and how much: only what is expected to bring more tokens than its rows cost."""

from __future__ import annotations

import numpy as np

from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu.spec_decode.drafter import Drafter
from vllm.v1.worker.gpu.spec_decode.ngram import NO_DRAFT
from vllm.v1.worker.gpu.states import RequestStates

# Rows of a step at which it takes twice the time of one row: reading the weights, and computing with them.
_ROWS_TO_FILL = {"cpu": 12}
_ROWS_TO_FILL_ELSEWHERE = 128
# What a step with drafts costs beyond its rows, as a share of the step.
_OVERHEAD = 0.04
# Drafts some time ago count for less: a text that did not copy may begin to.
_DECAY = 0.75
# What a request is taken to have drafted before it did: half of it right.
_PRIOR_RIGHT, _PRIOR_ENDED = 0.5, 0.5
_FIRST_WAIT, _LONGEST_WAIT = 8, 64


class AdaptiveDrafter:
    """Asks a drafter for as many tokens as pay. It has an estimate for each request of how often a drafted token is
    right. A request whose drafts do not pay has none for a number of steps, twice as many each time that one then fails
    again. Times are not measured, so that ranks agree and a run can be repeated: costs are those of a device's kind.

    A step with n requests yields n tokens; with c rows to fill the device, each further row costs n / (n + c) of a
    token's time, and drafting a token `token_cost`, which is its share of a step's time. A draft of k tokens, each
    right with probability p if those before it are, yields p + p^2 .. + p^k.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: SpeculativeConfig,
        max_num_reqs: int,
        device: str = "cpu",
        token_cost: float = 0.0,
    ) -> None:
        self.drafter = drafter
        self._token_cost = token_cost
        self._config = config
        self._rows_to_fill = _ROWS_TO_FILL.get(device, _ROWS_TO_FILL_ELSEWHERE)
        self._step = 0
        self._right = np.zeros(max_num_reqs)  # [S], drafted tokens that were right, the older ones for less
        self._ended = np.zeros(max_num_reqs)  # [S], drafts that ended in a wrong token, likewise
        self._wait = np.full(max_num_reqs, _FIRST_WAIT)  # [S], steps between attempts of a request that has stopped

    def add_request(self, slot: int, states: RequestStates) -> None:
        """See Drafter."""
        self._right[slot], self._ended[slot], self._wait[slot] = _PRIOR_RIGHT, _PRIOR_ENDED, _FIRST_WAIT
        self.drafter.add_request(slot, states)

    def remove_request(self, slot: int) -> None:
        """See Drafter."""
        self.drafter.remove_request(slot)

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter."""
        self._right[slots] = self._right[slots] * _DECAY + accepted
        self._ended[slots] = self._ended[slots] * _DECAY + (accepted < drafted)
        longer = np.minimum(self._wait[slots] * 2, _LONGEST_WAIT)
        self._wait[slots] = np.where(accepted > 0, _FIRST_WAIT, longer)
        self.drafter.observe(slots, drafted, accepted)

    def propose(self, slots: np.ndarray, states: RequestStates, room: np.ndarray) -> list[np.ndarray]:
        """See Drafter."""
        self._step += 1
        num_reqs = len(slots)
        most = np.minimum(room, self._config.tokens_at(num_reqs))
        row_cost = num_reqs / (num_reqs + self._rows_to_fill) + self._token_cost
        chance = self._chance(slots)
        wanted = np.minimum(_tokens_that_pay(chance, row_cost), most)
        wanted[_gain(chance, wanted, row_cost) <= _OVERHEAD] = 0
        tries = (wanted == 0) & (self._step % self._wait[slots] == 0)
        wanted[tries] = np.minimum(most[tries], 1 if row_cost > 0.25 else 2)
        drafts = self._drafts(slots, states, wanted)
        if tries.any():
            return drafts
        lengths = np.fromiter(map(len, drafts), np.int64, num_reqs)
        is_worth_it = _gain(chance, lengths, row_cost).sum() > _OVERHEAD * num_reqs
        return drafts if is_worth_it else [NO_DRAFT] * num_reqs

    def _drafts(self, slots: np.ndarray, states: RequestStates, wanted: np.ndarray) -> list[np.ndarray]:
        """The drafter's, of those that are to have any."""
        drafts = [NO_DRAFT] * len(slots)
        rows = np.flatnonzero(wanted)
        if len(rows):
            found = self.drafter.propose(slots[rows], states, wanted[rows].astype(np.int32))
            for row, draft in zip(rows.tolist(), found, strict=True):
                drafts[row] = draft
        return drafts

    def _chance(self, slots: np.ndarray) -> np.ndarray:
        """float [R] in (0, 1): that a drafted token is right if those before it are."""
        right = self._right[slots]
        return right / (right + self._ended[slots] + 0.05)


def _tokens_that_pay(chance: np.ndarray, row_cost: float) -> np.ndarray:
    """int [R]: as long as the last token's chance of being reached and right is above a row's cost."""
    num_tokens = np.floor(np.log(row_cost) / np.log(np.maximum(chance, 1e-6)))
    return np.maximum(num_tokens, 0).astype(np.int64)


def _gain(chance: np.ndarray, num_tokens: np.ndarray, row_cost: float) -> np.ndarray:
    """Tokens that drafts are expected to yield, float [R], less what their rows cost."""
    return chance * (1 - chance**num_tokens) / (1 - chance) - row_cost * num_tokens
