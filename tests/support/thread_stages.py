"""The stages of a model as threads of this process: quick to start, and every stage can be looked at."""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm import LLM
from vllm.config import VllmConfig
from vllm.distributed.communicator import Communicator
from vllm.distributed.stages import Stage, make_ends
from vllm.v1.executor.stages import StagesExecutor
from vllm.v1.executor.worker import Worker, call_worker
from vllm.v1.features.states.memory import fewest


class ThreadStages(StagesExecutor):
    """A StagesExecutor without processes.

    Attributes:
        workers: all stages', the last one first.
    """

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        self._late = deque()
        ends = reversed(make_ends(config.parallel_config.pipeline_parallel_size))
        self.workers = []
        for each in ends:
            group = Communicator()
            self.workers.append(Worker(config, group, Stage(each, group)))
        self.worker = self.workers[0]
        self.group = self.worker.group
        # A thread a stage does what comes in its order, as a process does.
        self._threads = [ThreadPoolExecutor(1) for _ in self.workers]
        self._steps: list[Future] = []
        for worker in self.workers:
            # One after another: a model is built under torch's default dtype, which all threads share.
            worker.load_model()
        self.state_slots = fewest(self.collective_rpc("determine_state_slots"))
        self.num_blocks = min(self.collective_rpc("determine_num_blocks"))
        self.num_host_blocks = min(self.collective_rpc("determine_num_host_blocks"))
        self.collective_rpc("initialize_kv_cache", (self.num_blocks, self.num_host_blocks, self.state_slots))

    def _send_step(self, method: str, *args: Any) -> None:
        sent = pickle.dumps((method, args))
        for worker, thread in zip(self.workers[1:], self._threads[1:], strict=True):
            own, given = pickle.loads(sent)
            self._steps.append(thread.submit(self._guarded, worker, own, given))

    def _guarded(self, worker: Worker, method: str, args: tuple) -> None:
        try:
            call_worker(worker, method, args, {})
        except BaseException:
            # Stages that wait for this one end, too.
            for each in self.workers:
                each.stage.disconnect()
            raise

    @contextlib.contextmanager
    def _failing(self):
        try:
            yield
        except BaseException:
            for step in self._steps:
                step.result()
            raise

    def collective_rpc(self, method: str | Callable, args: tuple = (), kwargs: dict | None = None) -> list[Any]:
        """A call on every stage."""
        if self._late:
            self._run_until(self._late[-1])
        others = [
            thread.submit(call_worker, worker, method, args, kwargs or {})
            for worker, thread in zip(self.workers[1:], self._threads[1:], strict=True)
        ]
        return [call_worker(self.worker, method, args, kwargs or {}), *(each.result() for each in others)]

    def check_health(self) -> None:
        """Nothing to check."""

    def shutdown(self) -> None:
        """End the threads."""
        for worker, thread in zip(self.workers, self._threads, strict=True):
            worker.stage.disconnect()
            thread.shutdown()


def make_staged_llm(folder: Path, num_stages: int, **fields: Any) -> LLM:
    """An LLM whose stages are threads; its executor is a ThreadStages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.core.make_executor", ThreadStages)
        return LLM(str(folder), pipeline_parallel_size=num_stages, **fields)
