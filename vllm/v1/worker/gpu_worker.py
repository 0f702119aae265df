"""The worker, at upstream's path; the same class serves CPUs."""

from vllm.v1.worker.worker import Worker

__all__ = ["Worker"]
