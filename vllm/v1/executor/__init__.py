"""Workers in this process, in others, on other machines."""

from vllm.v1.executor.abstract import Executor

__all__ = ["Executor"]
