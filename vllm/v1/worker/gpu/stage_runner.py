"""Runs a stage of a model that is not the last one: it samples and reads nothing."""

from __future__ import annotations

from torch import Tensor

from vllm.v1.outputs import PendingStep
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.step_result import StepResult


class StageRunner(GPUModelRunner):
    """The steps of a generating or pooling model, whose rows the model itself sends to the next stage. Tokens that were
    sampled come with the next step of their request (`features/stages`)."""

    def _finish_step(self, batch: InputBatch, hidden: Tensor) -> PendingStep:
        return StepResult([], [], self.states, None, None, ())
