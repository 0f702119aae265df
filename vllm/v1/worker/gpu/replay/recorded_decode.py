"""Decode steps on the CPU, recorded at the first of each size and replayed after: one operator a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.logger import init_logger
from vllm.logprobs.lists import WIDEST_TABLE
from vllm.ops.recording import RecordedMemory, Recording
from vllm.utils.host_memory import return_freed_memory
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, ModelInputs
from vllm.v1.worker.gpu.sample.logprob import Columns, greedy_readings
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import Reads
from vllm.v1.worker.gpu.states import BlockTables, KVCaches, RequestStates

logger = init_logger(__name__)

MAX_ROWS = 256
"""Requests of a recorded step: with more, the kernels' time leaves little to save."""

MAX_EXPANDED_ROWS = 32
"""Tokens of a recorded step where a request has several. Its size varies, and a larger step has less to save."""

# A recording of 30 layers takes half a MiB.
_MAX_RECORDINGS = 64


class _Inputs:
    """The inputs of up to R requests, and of up to T tokens, at fixed addresses."""

    def __init__(self, num_rows: int, num_tokens: int, max_num_blocks: int, num_groups: int = 1) -> None:
        self._input_ids = torch.empty(num_tokens, dtype=torch.int32)
        self._positions = torch.empty(num_tokens, dtype=torch.int64)
        self._query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32)  # where each has one token
        self._expanded_start_loc = torch.empty(num_rows + 1, dtype=torch.int32)
        self._seq_lens = torch.empty(num_rows, dtype=torch.int32)
        self._slot_mappings = [torch.empty(num_tokens, dtype=torch.int64) for _ in range(num_groups)]
        self._state_slots = torch.empty(num_rows, dtype=torch.int64)
        self._block_tables = [torch.zeros((num_rows, max_num_blocks), dtype=torch.int32) for _ in range(num_groups)]
        numbers = self._positions, self._seq_lens, self._state_slots, *self._slot_mappings
        self._numbers_np = [each.numpy() for each in numbers]
        self._expanded_start_loc_np = self._expanded_start_loc.numpy()
        self._input_ids_np = self._input_ids.numpy()
        self._block_tables_np = [each.numpy() for each in self._block_tables]

    def fill(self, batch: InputBatch, states: RequestStates) -> None:
        """Copy a batch's inputs here: the rows that it fills."""
        num_rows = len(batch.req_ids)
        known = states.last_sampled is None
        self._input_ids_np[: len(batch.input_ids_np)] = (
            batch.input_ids_np if known else batch.to_device(states).input_ids.numpy()
        )
        numbers = [batch.model_positions_np, batch.seq_lens_np, batch.idx_mapping_np, *batch.slot_mappings_np]
        for kept, given in zip(self._numbers_np, numbers, strict=True):
            kept[: len(given)] = given
        if batch.expanded_np is not None:
            self._expanded_start_loc_np[: num_rows + 1] = batch.query_start_loc_np
        for kept, table in zip(self._block_tables_np, batch.block_tables, strict=True):
            width = -(-batch.max_seq_len // table.block_size)
            kept[:num_rows, :width] = table.table[batch.idx_mapping_np, :width]

    def of(self, inputs: ModelInputs) -> ModelInputs:
        """The inputs of the batch that was copied here, `inputs`, at these addresses."""
        own = self._group(inputs.attn, 0)
        own.groups = tuple(self._group(attn, index) for index, attn in enumerate(inputs.attn.groups, 1))
        num_tokens = len(inputs.input_ids)
        return ModelInputs(self._input_ids[:num_tokens], self._positions[:num_tokens], own, inputs.hidden_rows)

    def _group(self, attn: AttentionMetadata, index: int) -> AttentionMetadata:
        num_rows, num_tokens = len(attn.seq_lens), len(attn.slot_mapping)
        starts = self._query_start_loc if num_rows == num_tokens else self._expanded_start_loc
        return replace(
            attn,
            slot_mapping=self._slot_mappings[index][:num_tokens],
            block_table=self._block_tables[index][:num_rows],
            query_start_loc=starts[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            state_slots=self._state_slots[:num_rows],
        )


@dataclass
class RecordedStep:
    """A recorded step of R requests and T tokens."""

    recording: Recording
    hidden: Tensor  # [T, H], final hidden states
    streams: Sequence[Tensor] = ()  # that the model keeps, [T, H] each
    sampling: dict[Any, Any] = field(default_factory=dict)  # of RecordedGreedy


class RecordedDecode:
    """The model's forward pass for steps of up to MAX_ROWS requests that compute one token each, or up to
    MAX_EXPANDED_ROWS together: kernels read how many each request has. A replay runs the same kernels on the same
    numbers, so results are equal bit for bit. It bypasses Python: hooks on modules are not called (use `enforce_eager`
    for them). A model with an operation that cannot be recorded is not recorded at all, and the log says so."""

    def __init__(
        self,
        model: Any,
        kv_caches: KVCaches,
        states: RequestStates,
        block_tables: BlockTables,
        max_num_reqs: int,
        num_groups: int = 1,
    ) -> None:
        """Recordings keep the addresses of `kv_caches`; `max_num_reqs` is the most requests that a step can have."""
        self._model = model
        self._kv_caches = kv_caches
        self._states = states
        self._max_rows = min(max_num_reqs, MAX_ROWS)
        num_tokens = max(self._max_rows, MAX_EXPANDED_ROWS)
        self._inputs = _Inputs(self._max_rows, num_tokens, block_tables.table.shape[1], num_groups)
        self.memory = RecordedMemory()
        # By numbers of requests and of tokens, and whether layers are changed, least recently used first.
        self._recorded: dict[tuple[int, int, bool], RecordedStep] = {}
        self._records = True

    def takes(self, batch: InputBatch) -> bool:
        """Whether `batch` can be replayed from a recording."""
        if not self._records or len(batch.req_ids) > self._max_rows:
            return False
        if batch.is_changed:
            return batch.can_record_change
        return batch.is_decode or (batch.is_expanded_decode and len(batch.input_ids_np) <= MAX_EXPANDED_ROWS)

    def step_for(self, batch: InputBatch) -> RecordedStep | None:
        """The recording that a batch was replayed from, or made it; None: it cannot be recorded."""
        return self._recorded.get(_key(batch))

    def __call__(self, batch: InputBatch) -> Tensor:
        """Final hidden states, [T, H]; valid until the next step."""
        self._inputs.fill(batch, self._states)
        key = _key(batch)
        step = self._recorded.pop(key, None)
        if step is not None:
            step.recording.replay()
            if step.streams:
                self._model.model.streams = step.streams
        else:
            step = self._record(batch)
            if not self._records:
                return step.hidden
        self._recorded[key] = step
        if len(self._recorded) > _MAX_RECORDINGS:
            del self._recorded[next(iter(self._recorded))]
        return step.hidden

    def _record(self, batch: InputBatch) -> RecordedStep:
        inputs = self._inputs.of(batch.to_device(self._states))
        recording = Recording(self.memory)
        with recording:
            hidden = self._model(inputs.input_ids, inputs.positions, self._kv_caches, inputs.attn)
        if recording.missed:
            missed = ", ".join(sorted(recording.missed))
            logger.info("Decode steps are not recorded but run by Python, because of %s", missed)
            self._records = False
        else:
            # Recorded calls are allocated between kernels' buffers, which leave holes of hundreds of KiB when freed.
            return_freed_memory()
        return RecordedStep(recording, hidden, streams_of(self._model))


def _key(batch: InputBatch) -> tuple[int, int, bool]:
    return len(batch.req_ids), len(batch.input_ids_np), batch.is_changed


def keeps_streams(model: Any) -> bool:
    """Whether a model keeps what comes before some of its layers; captured steps do not."""
    return bool(getattr(getattr(model, "model", None), "kept_streams", ()))


def streams_of(model: Any) -> Sequence[Tensor]:
    """The streams that a model has kept in the last step, [T, H] each."""
    streams: Sequence[Tensor] = getattr(getattr(model, "model", None), "streams", ())
    return streams


# Recorded logits keep their memory; those of larger batches take what the prompts' leave.
_MOST_LOGITS_BYTES = 16 * 2**20


class _Sampling(NamedTuple):
    """A recording, and what it reads and fills."""

    recording: Recording
    token_ids: Tensor  # int32 [R]
    health: Tensor  # float32 [R]
    columns: Columns | None
    readings: LogprobsTensors | None


class _Plan(NamedTuple):
    """The readings of rows."""

    slots: bytes
    version: int  # of the sampler
    columns: Columns | None  # None: nothing


class RecordedGreedy:
    """Samples by the operators that the sampler calls for such rows, so with the same bits. Steps that read the most
    likely tokens or the entropy, or more columns than a table has, are left to the sampler."""

    def __init__(self, model: Any, sampler: Sampler, states: RequestStates) -> None:
        self._model = model
        self._sampler = sampler
        self._states = states
        self._most_rows = _MOST_LOGITS_BYTES // (4 * sampler.states.vocab_size)
        # Apart from the steps', whose hidden states are read while logits are written.
        self._memory = RecordedMemory()
        self._plan: _Plan | None = None

    def __call__(self, step: RecordedStep, slots: np.ndarray) -> SamplerOutput | None:
        """Sample what `step` has just computed for `slots` (int64 [R]); None: that is left to the sampler. The results
        are valid until the next step."""
        # A function that a caller has put in the method's place is called in every step.
        if len(slots) > self._most_rows or "compute_logits" in vars(self._model):
            return None
        plan = self._plan
        if plan is None or plan.version != self._sampler.version or plan.slots != slots.tobytes():
            plan = self._plan = self._plan_for(step.hidden, slots)
            if plan is None:
                return None
        columns = plan.columns
        key = None if columns is None else (columns.table.shape[1], columns.num_valid is None)
        if key not in step.sampling:
            step.sampling[key] = self._record(step.hidden, columns)
        sampling: _Sampling | None = step.sampling[key]
        if sampling is None:
            return None
        if columns is not None and sampling.columns is not None:
            sampling.columns.table.copy_(columns.table)
            if columns.num_valid is not None and sampling.columns.num_valid is not None:
                sampling.columns.num_valid.copy_(columns.num_valid)
        sampling.recording.replay()
        output = SamplerOutput(sampling.token_ids, sampling.health)
        if columns is not None and sampling.readings is not None and sampling.readings.table is not None:
            # The table of readings outlives the step.
            table = sampling.readings.table.clone()
            readings = sampling.readings._replace(table=table, num_token_ids=columns.num_token_ids)
            output.logprobs.append((range(len(slots)), readings))
        return output

    def _plan_for(self, hidden: Tensor, slots: np.ndarray) -> _Plan | None:
        """The plan of these rows' readings; None: they cannot be replayed. A row that is plain stays so until its slot
        changes."""
        sampler = self._sampler
        if not sampler.is_plain(slots, self._states).all():
            return None
        (kind, *others) = (kind for _, kind in sampler.states.reading_groups(slots, by_mode=False))
        if others or kind & Reads.ENTROPY:
            return None
        columns = sampler.columns.of(hidden, slots) if kind else None
        if columns is not None and (columns.num_topk or columns.table.shape[1] > WIDEST_TABLE):
            return None
        return _Plan(slots.tobytes(), sampler.version, columns)

    def _record(self, hidden: Tensor, columns: Columns | None) -> _Sampling | None:
        """None: an operation cannot be recorded, such as a bound on logits."""
        own, readings = None, None
        if columns is not None:
            num_valid = None if columns.num_valid is None else columns.num_valid.clone()
            own = columns._replace(table=columns.table.clone(), num_valid=num_valid)
        recording = Recording(self._memory)
        with recording:
            logits = self._model.compute_logits(hidden)
            if own is None:
                token_ids, health = self._sampler.vocab.most_likely(logits)
            else:
                token_ids, readings = greedy_readings(logits, own, vocab=self._sampler.vocab)
                health = readings.lse
        return None if recording.missed else _Sampling(recording, token_ids, health, own, readings)
