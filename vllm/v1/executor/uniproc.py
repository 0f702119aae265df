"""One worker in the caller's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.communicator import ALONE, Communicator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.worker import call_worker, make_worker
from vllm.v1.features.states.memory import StateSlots
from vllm.v1.outputs import ModelRunnerOutput, PendingStep


class UniProcExecutor:
    """One worker in the caller's process; attributes and methods as MultiprocExecutor."""

    def __init__(self, config: VllmConfig, use_tqdm: bool = False, group: Communicator = ALONE) -> None:
        self.worker = make_worker(config, group)
        # Upstream's name; callers delete it when they are done.
        self.driver_worker = self.worker
        self.group = group
        self.worker.load_model(use_tqdm)
        self.state_slots = StateSlots(*map(self._least, self.worker.determine_state_slots()))
        self.num_blocks = self._least(self.worker.determine_num_blocks())
        self.num_host_blocks = self._least(self.worker.determine_num_host_blocks())
        self.worker.initialize_kv_cache(self.num_blocks, self.num_host_blocks, self.state_slots)

    def _least(self, number: int) -> int:
        return number

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.worker.execute_model(scheduler_output)

    def begin_step(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Begin a step on every rank; results are taken in the order of steps, and may be taken after the next step has
        begun."""
        return self.worker.begin_step(scheduler_output)

    def collective_rpc(self, method: str | Callable, args: tuple = (), kwargs: dict | None = None) -> list[Any]:
        return [call_worker(self.worker, method, args, kwargs or {})]

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
