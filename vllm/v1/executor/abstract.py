"""The executors of engines, which run their workers: one in this process, or one a rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.ray_utils import import_ray_for
from vllm.v1.executor.external_launcher import ExternalLauncherExecutor
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.stages import StagesExecutor
from vllm.v1.executor.uniproc import UniProcExecutor


def executor_class(vllm_config: VllmConfig) -> type[UniProcExecutor | MultiprocExecutor]:
    """The class that `vllm_config` asks for.

    Raises:
        ImportError: it needs Ray, which is not installed.
    """
    if vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        return ExternalLauncherExecutor
    if vllm_config.parallel_config.world_size == 1:
        return UniProcExecutor
    is_staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    if vllm_config.parallel_config.distributed_executor_backend == "ray":
        import_ray_for()
        from vllm.v1.executor.ray_executor import RayExecutor, RayStagesExecutor

        return RayStagesExecutor if is_staged else RayExecutor
    return StagesExecutor if is_staged else MultiprocExecutor


def make_executor(config: VllmConfig, use_tqdm: bool = False) -> UniProcExecutor | MultiprocExecutor:
    """An executor of that class, with the model loaded."""
    return executor_class(config)(config, use_tqdm)


class Executor(ABC):
    """Base of the executors, for isinstance; `distributed_executor_backend` chooses one."""

    get_class = staticmethod(executor_class)

    @abstractmethod
    def collective_rpc(self, method: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call every worker."""


Executor.register(UniProcExecutor)
Executor.register(MultiprocExecutor)
