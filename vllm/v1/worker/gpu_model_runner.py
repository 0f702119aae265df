"""The model runner, at upstream's path; the same class serves CPUs."""

from vllm.v1.worker.gpu.model_runner import GPUModelRunner

__all__ = ["GPUModelRunner"]
