"""A drafter of tokens."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from vllm.v1.worker.gpu.states import RequestStates


class Drafter(Protocol):
    """Guesses the tokens that follow those of a request. A guess may be anything: it never changes what is generated,
    only how many steps that takes. Every rank of a tensor-parallel group calls its drafter alike, in the same order. An
    exception of `propose` or `observe` is logged once, and these requests go on without drafts."""

    def add_request(self, slot: int, states: RequestStates) -> None:
        """A request has taken the slot, with `states.total_len[slot]` tokens; after a preemption it does so again."""

    def remove_request(self, slot: int) -> None:
        """The slot's request has ended or was preempted."""

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from the drafts of the last step: of `slots`, int64 [R], `drafted` tokens, int32 [R], above 0, were
        verified, and the first `accepted`, int32 [R], are right. `states.total_len` counts these, and the token after
        them. It is called before `propose`."""

    def propose(self, slots: np.ndarray, states: RequestStates, room: np.ndarray) -> list[np.ndarray]:
        """Drafts of the requests in `slots`, int64 [R], distinct: of each at most `room` tokens, int32 [R], from 0 on,
        as an int32 array that may be empty; they follow `states.token_ids[slot, : states.total_len[slot]]`. Tokens
        beyond the room are cut off, and those from the first invalid id on."""
        ...


class CachedDrafter(Drafter, Protocol):
    """One whose layers have keys and values beside the target's."""

    model: Any

    @property
    def num_own_blocks(self) -> int:
        """Blocks of its cache beyond the target's."""
        ...

    @property
    def block_bytes(self) -> int:
        """The bytes of what it keeps in a block."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate its cache, beside a target's of `num_blocks`; 0: free it."""
        ...
