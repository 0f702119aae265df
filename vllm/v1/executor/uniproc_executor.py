"""Executors in the caller's process, at upstream's path."""

from vllm.v1.executor.external_launcher import ExternalLauncherExecutor as ExecutorWithExternalLauncher
from vllm.v1.executor.uniproc import UniProcExecutor

__all__ = ["ExecutorWithExternalLauncher", "UniProcExecutor"]
