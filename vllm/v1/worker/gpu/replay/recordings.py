"""The replay of a CPU: recorded decode steps, and their sampling; deferred steps of many tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.replay.deferred_steps import DeferredSteps
from vllm.v1.worker.gpu.replay.interface import Replay
from vllm.v1.worker.gpu.replay.recorded_decode import RecordedDecode
from vllm.v1.worker.gpu.replay.recorded_greedy import RecordedGreedy
from vllm.v1.worker.gpu.sample.output import SamplerOutput


class Recordings(Replay):
    """
    Attributes:
        steps: of decoding.
        large_steps: others, of many tokens.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        first, num_groups = runner.block_tables[0], len(runner.block_tables)
        parts = runner.model, runner.kv_caches, runner.states, first
        self.steps = RecordedDecode(*parts, runner.max_decode_rows, num_groups)
        self.large_steps = DeferredSteps(runner, self.steps.memory)
        # With async_scheduling, results outlive the next step's beginning.
        is_ahead = runner.states.last_sampled is not None
        self._greedy = None if is_ahead else RecordedGreedy(runner.model, runner.sampler, runner.states)

    def takes(self, batch: InputBatch) -> bool:
        return self.steps.takes(batch) or self.large_steps.takes(batch)

    def forward(self, batch: InputBatch) -> Tensor:
        return self.steps(batch) if self.steps.takes(batch) else self.large_steps(batch)

    def sample(self, batch: InputBatch, slots: np.ndarray) -> SamplerOutput | None:
        if self._greedy is None or self._runner.sampler.is_followed or len(slots) < len(batch.input_ids_np):
            return None
        step = self.steps.step_for(batch) if self.steps.takes(batch) else None
        return None if step is None else self._greedy(step, slots)
