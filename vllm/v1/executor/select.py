"""Which executor an engine gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.distributed.communicator import Communicator
from vllm.utils.ray_utils import import_ray_for
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.external_launcher import ExternalLauncherExecutor
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.uniproc import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker import Worker


class Executor(Protocol):
    """The calls that the engine core makes on workers: see MultiprocExecutor.

    Attributes:
        worker, driver_worker: rank 0's.
        group: rank 0's.
        num_blocks: KV blocks that every rank has.
        num_host_blocks: blocks of host memory that every rank has for them.
    """

    worker: Worker
    group: Communicator
    num_blocks: int
    num_host_blocks: int

    @property
    def driver_worker(self) -> Worker: ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]: ...

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


def make_executor(config: VllmConfig, use_tqdm: bool = False) -> Executor:
    """The executor that `config` asks for, its model loaded.

    Raises:
        ImportError: it asks for Ray, which is not installed.
    """
    if config.parallel_config.distributed_executor_backend == "external_launcher":
        return ExternalLauncherExecutor(config, use_tqdm)
    if config.parallel_config.tensor_parallel_size == 1:
        return UniProcExecutor(config, use_tqdm)
    if config.parallel_config.distributed_executor_backend == "ray":
        import_ray_for()
        from vllm.v1.executor.ray_executor import RayExecutor

        return RayExecutor(config, use_tqdm)
    return MultiprocExecutor(config, use_tqdm)
