"""A tensor-parallel group whose ranks are threads of this process: quick to start, and every rank can be looked at."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from tiny_llm import make_tiny_llm

from vllm import LLM
from vllm.config import VllmConfig
from vllm.distributed.communicator import Communicator
from vllm.distributed.process_group import join_group
from vllm.distributed.shared_memory import SharedMemoryCommunicator, make_links
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.multiproc import sendable
from vllm.v1.executor.worker import Worker, call_worker
from vllm.v1.features.states.memory import StateSlots
from vllm.v1.outputs import ModelRunnerOutput

Result = TypeVar("Result")

# A rank that raises must not leave the others waiting for long.
_TIMEOUT = timedelta(seconds=60)


class ThreadRanks:
    """N threads, one a rank, and their communicators.

    Args:
        world_size: N.
        shared: connect them through shared memory, as processes of one machine are; else by gloo.
    """

    def __init__(self, world_size: int, shared: bool = True) -> None:
        self._pool = ThreadPoolExecutor(world_size)
        self.groups: list[Communicator] = (_share if shared else _join)(world_size, self._pool)

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """function(rank) on all ranks at once; the results in the order of ranks."""
        running = [self._pool.submit(function, rank) for rank in range(len(self.groups))]
        return [each.result() for each in running]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _share(world_size: int, _: Any) -> list[Communicator]:
    groups = [SharedMemoryCommunicator(links) for links in make_links(world_size)]
    for group in groups:
        for each in group._sockets:
            each.settimeout(_TIMEOUT.total_seconds())
    return groups


def _join(world_size: int, pool: ThreadPoolExecutor) -> list[Communicator]:
    store, device = dist.HashStore(), torch.device("cpu")
    joining = [pool.submit(join_group, store, rank, world_size, device, "127.0.0.1") for rank in range(world_size)]
    groups = [each.result() for each in joining]
    for group in groups:
        group._group._set_default_timeout(_TIMEOUT)
    return groups


class ThreadExecutor:
    """An executor over ThreadRanks; see MultiprocExecutor, which it stands for.

    Attributes:
        workers: all ranks'.
        outputs: what each rank made of the last step.
    """

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        self._ranks = ThreadRanks(config.parallel_config.tensor_parallel_size)
        self.group = self._ranks.groups[0]
        self.workers = [Worker(config, group) for group in self._ranks.groups]
        self.worker = self.workers[0]
        for worker in self.workers:
            # One after another: a model is built under torch's default dtype, which all threads share. None can
            # wait for the others' packed weights meanwhile.
            worker.load_model(plans={worker.stage.index: "neither"})
        slots = self.collective_rpc("determine_state_slots")
        self.state_slots = StateSlots(*map(min, zip(*slots, strict=True)))
        self.num_blocks = min(self.collective_rpc("determine_num_blocks"))
        self.num_host_blocks = min(self.collective_rpc("determine_num_host_blocks"))
        self.collective_rpc("initialize_kv_cache", (self.num_blocks, self.num_host_blocks, self.state_slots))
        self.outputs: list[ModelRunnerOutput] = []

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step on every rank; the others get it as they would through a pipe."""
        sent = pickle.dumps(sendable(scheduler_output))
        self.outputs = self._ranks.run(
            lambda rank: self.workers[rank].execute_model(pickle.loads(sent) if rank else scheduler_output)
        )
        return self.outputs[0]

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """A call on every rank."""
        return self._ranks.run(lambda rank: call_worker(self.workers[rank], method, args, kwargs or {}))

    def check_health(self) -> None:
        """Nothing to check."""

    def shutdown(self) -> None:
        """End the threads."""
        self._ranks.close()


def make_thread_llm(folder: Path, world_size: int, **fields: Any) -> LLM:
    """make_tiny_llm over ranks that are threads; its executor is a ThreadExecutor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.core.make_executor", ThreadExecutor)
        return make_tiny_llm(folder, tensor_parallel_size=world_size, **fields)
