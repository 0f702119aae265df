"""Decode steps on CUDA, captured for a ladder of batch sizes and replayed: one launch for the model, and one for the
head, the draw and the readings where all rows are greedy and unprocessed."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.logger import init_logger
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import upload_into
from vllm.v1.worker.gpu.cuda import GraphRecorder
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import fill_columns, greedy_readings
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import Reads
from vllm.v1.worker.gpu.states import BlockTables, KVCaches, RequestStates

logger = init_logger(__name__)

# With more rows the kernels take longer than their launches.
_MAX_ROWS = 512

# Widths are rounded up to these; larger ones are not replayed.
_NUM_TOPK = (0, 8, 32)
_NUM_TOKEN_IDS = (0, 8, 32, 128)

# All greedy graphs take so much, beside the memory that they share.
_GREEDY_BYTES = 128 * 2**20
# CUDA keeps so much of a graph of some 20 kernels: an estimate, the driver does not tell.
_NODE_BYTES = 128 * 2**10

_Sampled = tuple[Tensor, Tensor, LogprobsTensors | None]  # token ids int32 [B], health float32 [B], readings


def ladder(max_rows: int) -> list[int]:
    """Batch sizes to capture, ascending, up to `max_rows` or the largest that gains by it."""
    most = min(max_rows, _MAX_ROWS)
    return sorted({size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most, 16)) if size < most} | {most})


class DecodeStep:
    """A captured step of B = `size` requests, one token each."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        # Positions, KV cache slots, the requests' slots, token ids, lengths; rows begin at multiples of 16 bytes.
        self.inputs = torch.zeros((5, -(-size // 4) * 4), dtype=torch.int32, device=device)
        self.query_start_loc = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.hidden: Tensor  # [B, H], final hidden states
        self.slots: Tensor  # int64 [B], by row; one past the last slot for padding rows
        self.replay: Callable[[], None]


class DecodeGraphs:
    """The model's forward pass for steps of requests that compute one token each, as RecordedDecode is on the CPU. A
    step is padded to the next size of the ladder. Padding rows are requests of one token in a KV block of their own, so
    kernels need no mask. The largest size is captured first, and the others reuse its memory."""

    def __init__(
        self,
        model: Any,
        kv_caches: KVCaches,
        states: RequestStates,
        block_tables: Sequence[BlockTables],
        sizes: list[int],
        scratch_block: int,
        max_seq_len: int,
        scratch_state: int = 0,
    ) -> None:
        """Graphs keep the addresses of `kv_caches` and `block_tables`, one a KV group; batch `sizes` are ascending; no
        request has `scratch_block`, nor the row `scratch_state` of state pools, which comes after all requests' rows;
        contexts longer than `max_seq_len` are not replayed."""
        self._model = model
        self._kv_caches = kv_caches
        self._states = states
        self._sizes = sizes
        self._block_tables = block_tables
        for table in block_tables:
            table.set_row(states.max_num_reqs, [scratch_block])
            table.apply_staged_writes()
        self._max_seq_len = max_seq_len
        self._scratch_state = scratch_state
        self._block_size = block_tables[0].block_size
        scratch_slot = scratch_block * self._block_size
        self._padding = np.array([0, scratch_slot, states.max_num_reqs, 0, 1], dtype=np.int32)[:, None]
        self._steps: dict[int, DecodeStep] = {}

    def record(self, recorder: GraphRecorder) -> None:
        start = time.monotonic()
        for size in reversed(self._sizes):
            step = DecodeStep(size, self._states.device)
            upload_into(step.inputs, np.repeat(self._padding, step.inputs.shape[1], axis=1))
            (step.hidden, step.slots), step.replay = recorder.record(partial(self._run, step))
            self._steps[size] = step
        logger.info("Decode steps of %d sizes recorded in %.1f s", len(self._sizes), time.monotonic() - start)

    def _run(self, step: DecodeStep) -> tuple[Tensor, Tensor]:
        positions, slot_mapping, slots = step.inputs[:3].to(torch.int64)[:, : step.size]
        token_ids, seq_lens = step.inputs[3:, : step.size]
        if self._states.last_sampled is not None:
            token_ids = self._states.known(token_ids, slots)
        lengths = seq_lens, 1, self._max_seq_len, step.size, self._max_seq_len
        tables = [table.tensor.index_select(0, slots) for table in self._block_tables]
        attn = AttentionMetadata(slot_mapping, tables[0], step.query_start_loc, *lengths)
        # Padding has the number after the last slot, of which some may have no state.
        attn.state_slots = slots.clamp(max=self._scratch_state)
        attn.groups = tuple(
            replace(attn, block_table=table, slot_mapping=self._slot_mapping(table, positions)) for table in tables[1:]
        )
        return self._model(token_ids, positions, self._kv_caches, attn), slots

    def _slot_mapping(self, table: Tensor, positions: Tensor) -> Tensor:
        """int64 [B], the KV cache slots of each row's token."""
        blocks = table.gather(1, (positions // self._block_size)[:, None])[:, 0].to(torch.int64)
        return blocks * self._block_size + positions % self._block_size

    def takes(self, batch: InputBatch) -> bool:
        """Whether a captured graph fits `batch`."""
        return batch.is_decode and len(batch.req_ids) <= self._sizes[-1] and batch.max_seq_len <= self._max_seq_len

    @property
    def steps(self) -> list[DecodeStep]:
        """The largest first."""
        return list(self._steps.values())

    def step_for(self, batch: InputBatch) -> DecodeStep:
        return self._steps[self._sizes[bisect.bisect_left(self._sizes, len(batch.req_ids))]]

    def __call__(self, batch: InputBatch) -> Tensor:
        """Final hidden states, [T, H]; valid until the next step."""
        step, num_rows = self.step_for(batch), len(batch.req_ids)
        inputs = np.empty(step.inputs.shape, dtype=np.int32)
        inputs[:, num_rows:] = self._padding
        inputs[:2, :num_rows] = batch.model_positions_np, batch.slot_mappings_np[0]
        inputs[2:, :num_rows] = batch.idx_mapping_np, batch.input_ids_np, batch.seq_lens_np
        upload_into(step.inputs, inputs)
        step.replay()
        return step.hidden[:num_rows]


class Widths(NamedTuple):
    """Columns that a step reads beside the sampled tokens."""

    reads: bool  # anything at all
    num_topk: int
    num_token_ids: int


_USUAL_WIDTHS = (Widths(False, 0, 0), Widths(True, 0, _NUM_TOKEN_IDS[1]), Widths(True, _NUM_TOPK[1], 0))


class _Graph(NamedTuple):
    sampled: _Sampled
    replay: Callable[[], None]
    num_bytes: int


class GreedyGraphs:
    """One graph for each batch size and width: the usual widths are captured at the start, others at their first use.
    When they take more than _GREEDY_BYTES together, the ones that were not used for longest go."""

    def __init__(self, model: Any, sampler: Sampler, states: RequestStates, recorder: GraphRecorder) -> None:
        self._model = model
        self._sampler = sampler
        self._states = states
        self._recorder = recorder
        self._max_bytes = _GREEDY_BYTES
        self._graphs: dict[tuple[int, Widths], _Graph] = {}  # the latest used last
        # Graphs read from fixed addresses: lists that are replayed do not move to a wider table.
        sampler.token_ids.token_ids.ensure_width(_NUM_TOKEN_IDS[-1])
        self._lists = sampler.token_ids.token_ids.tensor

    def record(self, steps: Iterable[DecodeStep]) -> None:
        """Capture the usual widths of these steps."""
        vocab_size = self._sampler.states.vocab_size
        for step in steps:
            # Capturing it has left values that are no slots where its results go.
            step.replay()
            for widths in _USUAL_WIDTHS:
                self._graph(step, widths._replace(num_topk=min(widths.num_topk, vocab_size)))

    def widths(self, slots: np.ndarray) -> Widths | None:
        """The widths that these slots (int64 [R]) read, rounded up; None: the step cannot be replayed."""
        sampler, own = self._sampler, self._sampler.states
        reads = own.reads[slots]
        if (reads & Reads.ENTROPY).any() or not sampler.is_plain(slots, self._states).all():
            return None
        num_topk = _round_up(int(own.num_topk[slots].max()), _NUM_TOPK)
        num_token_ids = _round_up(sampler.token_ids.max_num_token_ids(slots), _NUM_TOKEN_IDS)
        if num_topk is None or num_token_ids is None:
            return None
        return Widths(bool(reads.any()), min(num_topk, own.vocab_size), num_token_ids)

    def __call__(self, step: DecodeStep, slots: np.ndarray, widths: Widths) -> SamplerOutput:
        """Sample what `step` has just computed for `slots`, and keep the tokens on the device for the next step. The
        results are valid until the next step."""
        if self._lists is not self._sampler.token_ids.token_ids.tensor:
            # Longer ones than are replayed have come.
            self._lists = self._sampler.token_ids.token_ids.tensor
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1].num_token_ids}
        graph = self._graph(step, widths)
        graph.replay()
        token_ids, health, readings = graph.sampled
        num_rows = len(slots)
        output = SamplerOutput(token_ids[:num_rows], health[:num_rows])
        if readings is not None:
            reads = self._sampler.states.reads[slots] > 0
            rows = range(num_rows) if reads.all() else np.where(reads, np.arange(num_rows), -1).tolist()
            output.logprobs.append((rows, readings.moved(lambda tensor: tensor[:num_rows])))
        return output

    def _graph(self, step: DecodeStep, widths: Widths) -> _Graph:
        key = step.size, widths
        graph = self._graphs.pop(key, None)
        if graph is None:
            sampled, replay = self._recorder.record(lambda: self._run(step, widths))
            graph = _Graph(sampled, replay, _NODE_BYTES + _num_bytes(sampled))
            # Nothing runs at this time: recording has waited for the device.
            total = graph.num_bytes + sum(other.num_bytes for other in self._graphs.values())
            for oldest in list(self._graphs):
                if total <= self._max_bytes:
                    break
                total -= self._graphs.pop(oldest).num_bytes
        self._graphs[key] = graph
        return graph

    def _run(self, step: DecodeStep, widths: Widths) -> _Sampled:
        logits, sampler = self._model.compute_logits(step.hidden), self._sampler
        readings: LogprobsTensors | None = None
        if widths.reads:
            # Padding reads what the last slot reads.
            slots = step.slots.clamp(max=self._states.max_num_reqs - 1)
            columns = fill_columns(logits, widths.num_topk, sampler.token_ids, slots, widths.num_token_ids)
            token_ids, readings = greedy_readings(logits, columns, vocab=sampler.vocab)
            health = readings.lse
        else:
            token_ids, health = sampler.vocab.most_likely(logits)
        if self._states.last_sampled is not None:
            self._states.keep_sampled(step.slots, token_ids)
        return token_ids, health, readings


def _num_bytes(sampled: _Sampled) -> int:
    """The bytes of the results, which a graph keeps; what it computes on the way lies in memory that all graphs
    share."""
    token_ids, health, readings = sampled
    of_readings = [] if readings is None else [each for each in readings if isinstance(each, Tensor)]
    return sum(tensor.nbytes for tensor in (token_ids, health, *of_readings))


def _round_up(value: int, steps: Sequence[int]) -> int | None:
    """The first of `steps` (ascending) that is no less; None: there is none."""
    return next((step for step in steps if step >= value), None)
