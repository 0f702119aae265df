"""Drafts for the next step, from a drafter that may fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.spec_decode.drafter import CachedDrafter, Drafter
from vllm.v1.worker.gpu.states import RequestStates

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.spec_decode.follower import Follower

logger = init_logger(__name__)


class Speculator:
    """Asks a drafter on behalf of the slots' requests. Those for which it raises go on without drafts."""

    drafter: Drafter
    draft_model: CachedDrafter | None = None
    """The part of the drafter that has a model, and so a cache."""
    follower: Follower | None = None
    """The part of the drafter that takes the target's hidden states."""

    def __init__(self, num_tokens: int, vocab_size: int, states: RequestStates) -> None:
        """`num_tokens`: the most that are drafted for a request at once. The drafter is set afterwards."""
        self.num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._states = states
        max_num_reqs, width = states.token_ids.shape
        self._longest = width - 1
        self._limits = np.zeros(max_num_reqs, dtype=np.int64)  # [S], the request's tokens at its end
        self._failed = np.zeros(max_num_reqs, dtype=bool)  # [S]
        self._has_warned = False

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """The request has taken the slot."""
        longest = self._longest
        if params.max_tokens is not None:
            longest = min(int(self._states.prompt_len[slot]) + params.max_tokens, longest)
        self._limits[slot], self._failed[slot] = longest, False
        self._try(np.array([slot]), self.drafter.add_request, slot, self._states)

    def remove_request(self, slot: int) -> None:
        self._try(np.array([slot]), self.drafter.remove_request, slot)

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter.observe."""
        if (chosen := ~self._failed[slots]).any():
            self._try(slots[chosen], self.drafter.observe, slots[chosen], drafted[chosen], accepted[chosen])

    def propose(self, slots: np.ndarray) -> dict[int, list[int]]:
        """By index into `slots`, int64 [R], the drafts of those that have any."""
        # One token is drawn after the last draft.
        room = np.minimum(self._limits[slots] - self._states.total_len[slots] - 1, self.num_tokens)
        asked = np.flatnonzero((room > 0) & ~self._failed[slots])
        if not len(asked):
            return {}
        own, room = slots[asked], room[asked].astype(np.int32)
        drafts = self._try(own, self.drafter.propose, own, self._states, room)
        if drafts is None:
            return {}
        found = zip(asked.tolist(), drafts, room.tolist(), strict=True)
        return {index: usable for index, draft, most in found if (usable := self._usable(draft, most))}

    def _usable(self, draft: np.ndarray, most: int) -> list[int]:
        """The draft up to its room, or to its first invalid id."""
        if not len(draft):
            return []
        draft = draft[:most]
        is_valid = (draft >= 0) & (draft < self._vocab_size)
        return draft.tolist() if is_valid.all() else draft[: int(is_valid.argmin())].tolist()

    def _try(self, slots: np.ndarray, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception:
            self._failed[slots] = True
            if not self._has_warned:
                self._has_warned = True
                logger.exception("The drafter failed; requests for which it does go on without drafts")
            return None
