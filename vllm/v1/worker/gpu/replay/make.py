"""The steps of a model that may be recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backend import AttentionBackend
from vllm.layers.attention import attention_layers
from vllm.layers.experts import asks_for_counts
from vllm.layers.state import state_layers
from vllm.ops.recording import can_record
from vllm.v1.worker.gpu.cuda import GraphRecorder, graph_recorder
from vllm.v1.worker.gpu.guests import CacheSizes
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.replay.decode_graphs import DecodeGraphs, GreedyGraphs, ladder
from vllm.v1.worker.gpu.replay.deferred_steps import DeferredSteps
from vllm.v1.worker.gpu.replay.piecewise_graphs import PiecewiseGraphs
from vllm.v1.worker.gpu.replay.recorded_decode import RecordedDecode, RecordedGreedy, keeps_streams
from vllm.v1.worker.gpu.sample.output import SamplerOutput


class Replay:
    """The steps of a model that can be replayed. This class has none."""

    def takes(self, batch: InputBatch) -> bool:
        """Whether the forward pass of `batch` can be replayed, or recorded now."""
        return False

    def forward(self, batch: InputBatch) -> Tensor:
        """Final hidden states of `batch.hidden_rows_np`, [M, H], of a batch that it takes; valid until the next step,
        whose results may overwrite them."""
        raise NotImplementedError

    def sample(self, batch: InputBatch, slots: np.ndarray) -> SamplerOutput | None:
        """Sample all tokens of a batch that `forward` has just computed, of the requests in `slots`, int64 [L]; None:
        the sampler does. The results are valid until the next step."""
        return None


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


class Recordings(Replay):
    """The replay of a CPU: recorded decode steps, and their sampling; deferred steps of many tokens.

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


class ReplayMaker:
    """Records the steps of a runner's model, where its device and its layers allow that.

    Attributes:
        graphs: captures CUDA graphs; None: nothing is captured.
        num_extra_blocks: KV blocks beyond the pool's, for the padding rows of captured steps.
    """

    def __init__(self, runner: Any, backend: Any) -> None:
        self._runner, self._backend = runner, backend
        model, device = runner.model, runner.device
        may_capture = runner.records_steps and not runner.model_config.enforce_eager and backend.can_be_captured
        captures = may_capture and _can_capture_layers(model, device)
        captures = captures and not asks_for_counts(model) and not keeps_streams(model)
        self.graphs = graph_recorder(device, runner.group) if captures else None
        self.num_extra_blocks = 0 if self.graphs is None else 1

    def make(self, sizes: CacheSizes) -> Replay:
        """For the KV cache that there is: recordings keep its addresses."""
        runner = self._runner
        if self.graphs is not None:
            return self._capture(self.graphs, sizes)
        if runner.records_kernels and can_record(runner.block_tables[0].tensor):
            return Recordings(runner)
        return Replay()

    @torch.inference_mode()
    def _capture(self, recorder: GraphRecorder, sizes: CacheSizes) -> Replay:
        runner, has_states = self._runner, bool(state_layers(self._runner.model))
        max_model_len = runner.model_config.max_model_len
        limit = min(runner.model_config.max_seq_len_to_capture or max_model_len, max_model_len)
        # The row of padding comes after those of all requests.
        scratch = sizes.num_blocks, limit, sizes.state_slots.num_requests if has_states else 0
        graphs = Graphs(runner, recorder, ladder(runner.max_decode_rows), *scratch)
        if not has_states:
            # A step's rows, which states go by, are not those of a graph of some number of tokens.
            graphs.capture_pieces(self._backend)
        return graphs


def _can_capture_layers(model: Any, device: torch.device) -> bool:
    """Turing attends to latents in PyTorch, which waits for the device."""
    is_latent = any(layer.is_latent for layer in attention_layers(model))
    return not is_latent or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
