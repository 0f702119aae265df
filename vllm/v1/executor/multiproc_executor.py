"""One process a rank, at upstream's path."""

from vllm.v1.executor.multiproc import MultiprocExecutor

__all__ = ["MultiprocExecutor"]
