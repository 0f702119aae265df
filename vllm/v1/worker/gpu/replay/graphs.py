"""The replay of CUDA: graphs of decode steps and of their sampling, and pieces of steps with prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from vllm.attention.backend import AttentionBackend
from vllm.v1.worker.gpu.cuda import GraphRecorder
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.replay.decode_graphs import DecodeGraphs, GreedyGraphs
from vllm.v1.worker.gpu.replay.interface import Replay
from vllm.v1.worker.gpu.replay.piecewise_graphs import PiecewiseGraphs
from vllm.v1.worker.gpu.sample.output import SamplerOutput


class Graphs(Replay):
    """
    Attributes:
        steps: of decoding.
        greedy: the sampling of such steps.
        pieces: of other steps; None: they are not captured.
    """

    def __init__(
        self, runner: Any, recorder: GraphRecorder, sizes: list[int], scratch_block: int, limit: int, scratch_state: int
    ) -> None:
        """Captures decode steps; arguments as those of DecodeGraphs."""
        self._runner, self._recorder = runner, recorder
        scratch = scratch_block, limit, scratch_state
        parts = runner.model, runner.kv_caches, runner.states, runner.block_tables
        self.steps = DecodeGraphs(*parts, sizes, *scratch)
        self.steps.record(recorder)
        self.greedy = GreedyGraphs(runner.model, runner.sampler, runner.states, recorder)
        self.greedy.record(self.steps.steps)
        self.pieces: PiecewiseGraphs | None = None

    def capture_pieces(self, backend: AttentionBackend) -> None:
        """Capture what lies between the attention calls of other steps."""
        runner = self._runner
        parts = runner.model, backend, runner.kv_caches, runner.device, runner.max_tokens
        self.pieces = PiecewiseGraphs(*parts)
        self.pieces.record(self._recorder, len(runner.block_tables))

    def takes(self, batch: InputBatch) -> bool:
        if batch.is_changed:
            return False
        return self.steps.takes(batch) or (self.pieces is not None and self.pieces.takes(batch))

    def forward(self, batch: InputBatch) -> Tensor:
        if self.steps.takes(batch):
            return self.steps(batch)
        assert self.pieces is not None
        return self.pieces(batch.to_device(self._runner.states))

    def sample(self, batch: InputBatch, slots: np.ndarray) -> SamplerOutput | None:
        is_left = self._runner.sampler.is_followed or len(slots) < len(batch.input_ids_np)
        if is_left or batch.is_changed or not self.steps.takes(batch):
            return None
        widths = self.greedy.widths(slots)
        return None if widths is None else self.greedy(self.steps.step_for(batch), slots, widths)
