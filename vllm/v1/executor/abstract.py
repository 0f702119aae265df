"""The interface of executors, which run an engine's workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.select import executor_class
from vllm.v1.executor.uniproc import UniProcExecutor


class Executor(ABC):
    """Base of the executors, for isinstance; `distributed_executor_backend` chooses one."""

    @abstractmethod
    def collective_rpc(self, method: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call every worker."""

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type:
        """The executor that a configuration asks for.

        Raises:
            ImportError: it needs Ray, which is not installed.
        """
        return executor_class(vllm_config)


Executor.register(UniProcExecutor)
Executor.register(MultiprocExecutor)
