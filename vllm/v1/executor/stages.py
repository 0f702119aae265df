"""The executor of a model that is split by layers: the last stage's first rank is rank 0, in the caller's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.multiproc import MultiprocExecutor, sendable
from vllm.v1.outputs import ModelRunnerOutput, PendingStep


class StagesExecutor(MultiprocExecutor):
    """A step goes to the other ranks at once. Rank 0 does its own part when the result is asked for, or before a call
    that comes after the step; so the stages before it work on the steps that have begun meanwhile."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._late: deque[_LateStep] = deque()
        super().__init__(*args, **kwargs)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See MultiprocExecutor."""
        return self.begin_step(scheduler_output).result()

    def begin_step(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """See MultiprocExecutor."""
        with self._failing():
            self._send_step("execute_model", sendable(scheduler_output))
        self._late.append(step := _LateStep(scheduler_output, self._run_until))
        return step

    def collective_rpc(self, method: str | Callable, args: tuple = (), kwargs: dict | None = None) -> list[Any]:
        """See MultiprocExecutor."""
        if self._late:
            self._run_until(self._late[-1])
        return super().collective_rpc(method, args, kwargs)

    def _run_until(self, last: _LateStep) -> None:
        """Do rank 0's part of the steps up to this one, in their order."""
        while last.output is None:
            step = self._late.popleft()
            with self._failing():
                step.output = self.worker.execute_model(step.scheduled)


class _LateStep:
    """A PendingStep of which rank 0 has not done its part, or has its `output`."""

    output: ModelRunnerOutput | None = None

    def __init__(self, scheduled: SchedulerOutput, run_until: Callable[[_LateStep], None]) -> None:
        self.scheduled, self._run_until = scheduled, run_until

    def result(self) -> ModelRunnerOutput:
        self._run_until(self)
        assert self.output is not None
        return self.output
