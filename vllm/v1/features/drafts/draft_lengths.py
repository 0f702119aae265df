"""When to draft, and how much: only what is expected to bring more tokens than its rows cost."""

from __future__ import annotations

import numpy as np

from vllm.config import SpeculativeConfig

# Rows of a step that take as long to compute as the weights take to read.
_FREE_ROWS = {"cpu": 8}
_FREE_ROWS_ELSEWHERE = 128
# Drafts are to bring at least this, as a share of the tokens: they cost something beyond their rows.
_LEAST_GAIN = 0.04
# Drafts some time ago count for less: a text that did not copy may begin to.
_DECAY = 0.75
# A request is taken to have drafted so many tokens before it did: half of them right.
_PRIOR_RIGHT, _PRIOR_ENDED = 0.5, 0.5
_FIRST_WAIT, _LONGEST_WAIT = 8, 64
# The chance of a text that copies: nothing is tried where that would not pay.
_BEST_CHANCE = 0.97
# Drafts are cut to tokens that are right with at least such a probability; the one that yields most is
# taken.
_LEAST_CHANCES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95])[:, None]


class DraftLengths:
    """How many tokens pay for each request. There is an estimate of how often a drafted token is right. A request whose
    drafts do not pay has none for a number of steps, twice as many each time that one then fails again. Times are not
    measured, so that ranks agree and a run can be repeated: costs are those of a device's kind.

    A step of n rows takes the time sqrt(c^2 + n^2), with c rows that are as good as free, and drafting a token
    `token_cost` of a step. A draft of k tokens, each right with probability p if those before it are, yields
    p + p^2 .. + p^k. What is maximised is the step's tokens over its time. A configuration's own numbers by batch size
    are taken as they are.
    """

    def __init__(
        self, config: SpeculativeConfig, max_num_reqs: int, device: str = "cpu", token_cost: float = 0.0
    ) -> None:
        self._token_cost = token_cost
        self._config = config
        self._free_rows = _FREE_ROWS.get(device, _FREE_ROWS_ELSEWHERE)
        self._step = 0
        self._right = np.zeros(max_num_reqs)  # [S], drafted tokens that were right, the older ones for less
        self._ended = np.zeros(max_num_reqs)  # [S], drafts that ended in a wrong token, likewise
        self._wait = np.full(max_num_reqs, _FIRST_WAIT)  # [S], steps between attempts of a request that has stopped

    def add_request(self, slot: int) -> None:
        """A request has taken the slot."""
        self._right[slot], self._ended[slot], self._wait[slot] = _PRIOR_RIGHT, _PRIOR_ENDED, _FIRST_WAIT

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter."""
        self._right[slots] = self._right[slots] * _DECAY + accepted
        self._ended[slots] = self._ended[slots] * _DECAY + (accepted < drafted)
        longer = np.clip(self._wait[slots] * 2, _FIRST_WAIT, _LONGEST_WAIT)
        self._wait[slots] = np.where(accepted > 0, np.where(accepted == drafted, 1, _FIRST_WAIT), longer)

    def wanted(self, slots: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, bool]:
        """A step may draft for `slots`, int64 [R], at most `room` tokens, int32 [R]. Returns how many to ask for, int
        [R], and whether shorter drafts than these may not be worth it; then ask `are_worth_it`."""
        self._step += 1
        num_reqs = len(slots)
        most = np.minimum(room, self._config.tokens_at(num_reqs))
        if self._config.num_speculative_tokens_per_batch_size is not None:
            return most, False
        chance = self._chance(slots)
        choices = np.minimum(np.floor(np.log(_LEAST_CHANCES) / np.log(chance)), most)
        gains = self._gain(chance, choices)
        best = int(gains.argmax())
        wanted = choices[best].astype(np.int64) if gains[best] > _LEAST_GAIN else np.zeros(num_reqs, dtype=np.int64)
        tries = np.flatnonzero((wanted == 0) & (most > 0) & (self._step % self._wait[slots] == 0))
        if len(tries) and self._gain(np.full(num_reqs, _BEST_CHANCE), most[None])[0] > _LEAST_GAIN:
            # A few at a time, others at another time.
            tries = np.roll(tries, self._step // _FIRST_WAIT)[: 1 + num_reqs // 8]
            wanted[tries] = np.minimum(most[tries], 2 if num_reqs < self._free_rows else 1)
            return wanted, False
        return wanted, True

    def are_worth_it(self, slots: np.ndarray, lengths: np.ndarray) -> bool:
        """Whether drafts of `lengths`, int64 [R], are to be verified."""
        return bool(lengths.any() and self._gain(self._chance(slots), lengths[None])[0] > _LEAST_GAIN)

    def _gain(self, chance: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """float [C]: the step's tokens over its time, with drafts of `num_tokens`, int [C, R], above that without."""
        num_reqs = len(chance)
        right = (chance * (1 - chance**num_tokens) / (1 - chance)).sum(axis=1)
        plain = np.hypot(self._free_rows, num_reqs)
        seconds = np.hypot(self._free_rows, num_reqs + num_tokens.sum(axis=1)) / plain
        seconds = seconds + self._token_cost * num_tokens.max(axis=1)
        return (1 + right / num_reqs) / seconds - 1

    def _chance(self, slots: np.ndarray) -> np.ndarray:
        """float [R] in (0, 1): that a drafted token is right if those before it are."""
        right = self._right[slots] + 0.01
        return right / (right + self._ended[slots] + 0.05)
