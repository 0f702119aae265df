"""The worker of a CPU, at upstream's path."""

from vllm.v1.worker.worker import Worker as CPUWorker

__all__ = ["CPUWorker"]
