"""Readings: the token ids that each slot requests, and their logprobs and ranks from a step's logits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.ops.fill_token_ids import fill_logprob_token_ids
from vllm.ops.token_readings import RowReadings
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import StagedTensor, upload
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab

_INITIAL_WIDTH = 16
_NO_IDS = np.empty(0, dtype=np.int32).tobytes()


class LogprobTokenIdsState:
    """The `logprob_token_ids` of every slot, S = max_num_reqs. Lists are interned: slots with equal lists share one row
    of `token_ids`, so a hundred requests with the same labels upload them once. Row 0 is the empty list. The width of
    `token_ids` grows by powers of two."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.token_ids = StagedTensor((max_num_reqs + 1, _INITIAL_WIDTH), torch.int32, device)  # the distinct lists
        self.list_idx = StagedTensor(max_num_reqs, torch.int32, device)  # each slot's row of token_ids
        self.num_token_ids = StagedTensor(max_num_reqs, torch.int32, device)  # the length of each slot's list
        self._free_rows = list(range(max_num_reqs, 0, -1))
        self._row_of_list: dict[bytes, int] = {}
        self._list_of_slot: dict[int, bytes] = {}
        self._num_users: dict[bytes, int] = {}
        self.version = 0  # counts the changes of any slot's list

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        ids = sampling_params.logprob_token_ids_np
        key = ids.tobytes()
        if self._list_of_slot.get(req_idx, _NO_IDS) == key:
            return
        self.remove_request(req_idx)
        if not ids.size:
            return
        self.version += 1
        if key not in self._row_of_list:
            self.token_ids.ensure_width(1 << (ids.size - 1).bit_length())
            self._row_of_list[key] = row = self._free_rows.pop()
            padded = np.zeros(self.token_ids.np.shape[1], dtype=np.int32)
            padded[: ids.size] = ids
            self.token_ids.stage(row, padded)
        self._num_users[key] = self._num_users.get(key, 0) + 1
        self._list_of_slot[req_idx] = key
        self.list_idx.stage(req_idx, self._row_of_list[key])
        self.num_token_ids.stage(req_idx, ids.size)

    def remove_request(self, req_idx: int) -> None:
        key = self._list_of_slot.pop(req_idx, None)
        if key is None:
            return
        self.version += 1
        self.list_idx.stage(req_idx, 0)
        self.num_token_ids.stage(req_idx, 0)
        self._num_users[key] -= 1
        if not self._num_users[key]:
            del self._num_users[key]
            self._free_rows.append(self._row_of_list.pop(key))

    def apply_staged_writes(self) -> None:
        for table in (self.token_ids, self.list_idx, self.num_token_ids):
            table.apply_staged_writes()

    def max_num_token_ids(self, req_indices: np.ndarray) -> int:
        """The longest list's length among these slots (int [R])."""
        return int(self.num_token_ids.np[req_indices].max(initial=0))


def compute_topk_logprobs(
    logits: Tensor,
    num_logprobs: int,
    sampled_token_ids: Tensor,
    cu_num_logits: list[int] | None = None,
    logprob_token_ids_state: LogprobTokenIdsState | None = None,
    expanded_idx_mapping: Tensor | None = None,
    max_per_req_token_ids: int = 0,
    entropy: bool = False,
    vocab: WholeVocab = WHOLE,
    columns: Columns | None = None,
) -> LogprobsTensors:
    """Read the sampled token, the most likely ones and the requested ids of each row.

    Args:
        logits: [L, V] in float32, bfloat16 or float16.
        num_logprobs: K, the top-k entries of every row, in [0, V].
        sampled_token_ids: int [L].
        cu_num_logits: row bounds of each request, when a request has several rows.
        logprob_token_ids_state: the ids by slot. This and the mapping are needed when `max_per_req_token_ids` > 0.
        expanded_idx_mapping: int [L], each row's slot.
        max_per_req_token_ids: M, the longest list among the rows; 0 needs no masks.
        columns: replaces the state, the mapping and M.

    Returns:
        Columns: sampled, top-k, then the requested ids in their order. Cells beyond a row's ids hold id 0,
        logprob 0.0, logit 0.0 and rank 0.
    """
    if columns is None:
        columns = fill_columns(
            logits, num_logprobs, logprob_token_ids_state, expanded_idx_mapping, max_per_req_token_ids
        )
    first = sampled_token_ids.to(torch.int32)
    readings = vocab.read(logits, columns.table, num_logprobs, columns.num_valid, entropy, first)
    return as_tensors(readings, columns.num_valid, num_logprobs, columns.num_token_ids, cu_num_logits)


def greedy_readings(
    logits: Tensor, columns: Columns, entropy: bool = False, vocab: WholeVocab = WHOLE
) -> tuple[Tensor, LogprobsTensors]:
    """Sample greedily and read in one pass: token ids int32 [L] (the lowest id among equals), readings. The arguments
    are `compute_topk_logprobs`'s."""
    readings = vocab.read(logits, columns.table, columns.num_topk, columns.num_valid, entropy)
    return readings.argmax, as_tensors(readings, columns.num_valid, columns.num_topk, columns.num_token_ids)


class Columns(NamedTuple):
    """The columns to read of L rows; not to be written to."""

    table: Tensor  # int32 [L, 1 + K + M]: the last M are the requested ids, the others are undefined
    num_valid: Tensor | None  # int32 [L], how many of a row's columns count; None: all of them
    num_token_ids: Tensor | None  # int32 [L], how many of its last M; None: M is 0
    num_topk: int  # K


def fill_columns(
    logits: Tensor,
    num_logprobs: int,
    state: LogprobTokenIdsState | None,
    expanded_idx_mapping: Tensor | None,
    max_per_req_token_ids: int,
) -> Columns:
    """Columns of the rows of `logits`; the arguments are `compute_topk_logprobs`'s."""
    width = 1 + num_logprobs + max_per_req_token_ids
    table = torch.empty((len(logits), width), dtype=torch.int32, device=logits.device)
    if not max_per_req_token_ids:
        return Columns(table, None, None, num_logprobs)
    assert state is not None and expanded_idx_mapping is not None, "ids need their state and the rows' slots"
    lists = state.token_ids.tensor, state.list_idx.tensor, state.num_token_ids.tensor
    num_token_ids = fill_logprob_token_ids(table, 1 + num_logprobs, expanded_idx_mapping, *lists)
    return Columns(table, num_token_ids + (1 + num_logprobs), num_token_ids, num_logprobs)


class FilledColumns:
    """Caches the columns of recent batches until any slot's request reads something else: consecutive decode steps read
    the same."""

    _MOST = 8  # batches: a step has one for each group of rows that are read together
    _LARGEST = 65536  # ids; larger tables are not kept

    def __init__(self, token_ids: LogprobTokenIdsState, sampling: SamplingStates) -> None:
        self._token_ids = token_ids
        self._sampling = sampling
        self._version = (-1, -1)
        self._filled: dict[bytes, Columns] = {}

    def of(self, logits: Tensor, slots: np.ndarray) -> Columns:
        """Columns of the rows of `logits`, which are of `slots` (int64 [L]); K is the greatest top-k among them."""
        version = self._token_ids.version, self._sampling.topk_version
        if self._version != version:
            self._version, self._filled = version, {}
        key = slots.tobytes()
        found = self._filled.get(key)
        if found is None:
            num_topk, most = int(self._sampling.num_topk[slots].max()), self._token_ids.max_num_token_ids(slots)
            found = fill_columns(logits, num_topk, self._token_ids, upload(slots, logits.device), most)
            if found.table.numel() > self._LARGEST:
                return found
            if len(self._filled) >= self._MOST:
                self._filled.clear()
            self._filled[key] = found
        return found


def as_tensors(
    readings: RowReadings,
    num_valid: Tensor | None,
    num_topk: int,
    num_token_ids: Tensor | None = None,
    cu_num_generated_tokens: list[int] | None = None,
) -> LogprobsTensors:
    """Readings of the 1 + K + M columns `readings.token_ids`, of which a row's first `num_valid` (int32 [L]; None: all)
    count. The other arguments are those of LogprobsTensors."""
    columns, logprobs = readings.token_ids, readings.logprobs
    assert columns is not None
    if logprobs is None:
        logprobs = readings.logits - readings.lse[:, None]
        if num_valid is not None:
            column = torch.arange(columns.shape[1], dtype=torch.int32, device=columns.device)
            logprobs.masked_fill_(column >= num_valid[:, None], 0.0)
    return LogprobsTensors(
        logprob_token_ids=columns,
        logprobs=logprobs,
        cu_num_generated_tokens=cu_num_generated_tokens,
        logits=readings.logits,
        ranks=readings.ranks,
        lse=readings.lse,
        num_topk=num_topk,
        num_token_ids=num_token_ids,
        entropy=readings.entropy,
        table=readings.table,
    )


class ReadingClock:
    """Adds up the time of the passes that read logits, without waiting for the device: on CUDA it is the device's time
    between two events in its queue."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Time the work done, or queued on the device's current stream, in the context."""
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._pending.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """Seconds since the last take; CUDA work that is not done yet counts at a later one."""
        seconds, self._seconds = self._seconds, 0.0
        pending, self._pending = self._pending, []
        for begin, end in pending:
            if end.query():
                seconds += begin.elapsed_time(end) / 1000
            else:
                self._pending.append((begin, end))
        return seconds
