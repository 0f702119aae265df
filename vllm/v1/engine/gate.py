"""The gate before a step: the engine is paused or sleeps, or all that there is waits for something else."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.calls import SLEEP_TAGS
from vllm.v1.messages import EngineCoreOutput


class Gate:
    """Requests wait before it, in the scheduler's queues, and outputs that no step gives.

    Attributes:
        is_paused: all requests stay as they are.
        asleep: what sleeps, of SLEEP_TAGS.
        sleep_level: the deepest level of sleep since all was awake; 0: it is.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.asleep: set[str] = set()
        self.sleep_level = 0
        self._settled: list[EngineCoreOutput] = []

    def add(self, outputs: list[EngineCoreOutput]) -> None:
        """The next call of `take` gives these, too."""
        self._settled += outputs

    def fall_asleep(self, level: int) -> None:
        """All of the engine sleeps, at least at this level."""
        self.asleep, self.sleep_level = set(SLEEP_TAGS), max(self.sleep_level, level)

    def wake_up(self, tags: list[str] | None) -> None:
        """These parts are awake; None: all."""
        self.asleep -= set(tags or SLEEP_TAGS)
        if not self.asleep:
            self.sleep_level = 0

    def opens(self, scheduler: Any) -> bool:
        """Whether a step may begin; otherwise `take` what there is. RuntimeError: requests wait, but the engine sleeps
        or is paused."""
        if self._settled or scheduler.refused:
            return False
        if self.is_paused or self.asleep:
            if scheduler.has_unfinished_requests():
                self.check_awake()
                raise RuntimeError("the engine is paused: its requests wait until it goes on")
            return False
        return bool(scheduler.queue_prepared())

    def take(self, scheduler: Any) -> list[EngineCoreOutput]:
        """The outputs that are there without a step."""
        outputs: list[EngineCoreOutput] = self._settled + scheduler.refused
        self._settled, scheduler.refused = [], []
        return outputs

    def has_work(self, scheduler: Any) -> bool:
        """Whether a step has something to do, or outputs are there."""
        can_run = scheduler.has_unfinished_requests() or scheduler.is_transferring
        can_run = can_run and not (self.is_paused or self.asleep)
        return can_run or bool(self._settled) or bool(scheduler.refused)

    def check_awake(self) -> None:
        """RuntimeError: something of the engine sleeps."""
        if self.asleep:
            parts = " and ".join(part for part in SLEEP_TAGS if part in self.asleep)
            raise RuntimeError(f"the engine sleeps ({parts}): call wake_up() first")
