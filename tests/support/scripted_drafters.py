"""Drafters whose guesses a test knows, put into an engine that runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm import LLM
from vllm.v1.features.drafts.runner import Speculator
from vllm.v1.features.drafts.scheduler import Drafts
from vllm.v1.worker.gpu.states import RequestStates

Guess = Callable[[list[int], int], Sequence[int]]
"""A draft after these tokens, prompt and generated; the other argument is the room for it."""


class ScriptedDrafter:
    """Drafts what a function says, and notes what it is told."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.slots: set[int] = set()
        self.num_drafted = 0
        self.num_accepted = 0

    def add_request(self, slot: int, states: RequestStates) -> None:
        assert slot not in self.slots
        self.slots.add(slot)

    def remove_request(self, slot: int) -> None:
        self.slots.remove(slot)

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        assert (drafted > 0).all()
        assert (accepted <= drafted).all()
        self.num_drafted += int(drafted.sum())
        self.num_accepted += int(accepted.sum())

    def propose(self, slots: np.ndarray, states: RequestStates, room: np.ndarray) -> list[np.ndarray]:
        assert len(set(slots.tolist())) == len(slots)
        assert self.slots.issuperset(slots.tolist())
        known = [states.token_ids[slot, : states.total_len[slot]].tolist() for slot in slots]
        return [np.array(self._guess(*each), dtype=np.int32) for each in zip(known, room.tolist(), strict=True)]


def following(answers: Sequence[Sequence[int]]) -> Guess:
    """Guess the rest of the first of these token sequences that begins with the tokens."""

    def guess(tokens: list[int], room: int) -> Sequence[int]:
        count = len(tokens)
        found = (each for each in answers if list(each[:count]) == tokens)
        return next(found, ())[count : count + room]

    return guess


def speculate(llm: LLM, guess: Guess | None, num_tokens: int = 4) -> ScriptedDrafter | None:
    """Let an idle engine speculate by `guess`; None: not any more."""
    core = llm.llm_engine.engine_core
    core.step()  # the runner hears of the last requests' ends
    runner: Any = core.executor.worker.model_runner
    scheduler = core.scheduler
    others = [guest for guest in scheduler.guests if not isinstance(guest, Drafts)]
    scheduler.use_guests(others if guess is None else [Drafts(scheduler), *others])
    without = [guest for guest in runner.guests if not isinstance(guest, Speculator)]
    if guess is None:
        runner.use_guests(without)
        return None
    drafter = ScriptedDrafter(guess)
    speculator = Speculator(runner, num_tokens)
    speculator.drafter = drafter
    runner.use_guests([*without, speculator])
    return drafter


def speculator_of(runner: Any) -> Any:
    """The runner's."""
    return runner.guest(Speculator)
