"""Readings of prompt positions: from final hidden states through the head, tile by tile; on CUDA, for chosen tokens
alone, in one operation that keeps no logits in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.logprobs.id_rows import IdRows, readable
from vllm.logprobs.lists import LogprobsRows
from vllm.ops.linear_readings import has_linear_readings, linear_readings
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.cuda import HostCopies
from vllm.v1.worker.gpu.sample.logprob import ReadingClock, as_tensors
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates

TILE_BYTES = 24 * 2**20
"""Size of a tile of float32 logits, or one row where a row is larger. From 32 MiB on glibc would return each tile's
memory to the system, and every page of the next tile would be a fault."""

NON_FINITE_PROMPT = "the model's logits are not finite (NaN or infinity) at a prompt position, so it cannot be read"

NON_FINITE_RUN = "the model's logits are not finite (NaN or infinity), so no token can be read"

# Rows with more are read apart from the others, which would otherwise be read at their width.
_WIDE = 128
_NONE = np.iinfo(np.int64).max
_FUSED_ROWS = 8192  # read at once where no logits are kept
# For each the fused kernel takes as much as for 128 tokens of the vocabulary, and counts logits one id at a time.
_MOST_FUSED_IDS = 512


def num_tile_rows(vocab_size: int) -> int:
    return max(1, TILE_BYTES // (4 * vocab_size))


class PromptRows(NamedTuple):
    """N prompt positions to read, those of a request together and in order."""

    slots: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N]; the token read is the one after it
    sources: np.ndarray  # int64 [N], row of the matrix of hidden states


class _Run(NamedTuple):  # rows of a tile that belong to one request
    req_id: str
    rows: slice
    num_ids: int  # of the row that has most
    num_padding: int


@dataclass
class PromptReadings:
    """A step's readings of prompt positions. Tiles are added as they are dispatched, and their rows made by `take`.

    Attributes:
        copies: what brings tiles to the host; None on the CPU.
        rows: by request, in the order of positions.
        non_finite: requests with a position whose logits are not finite.
    """

    copies: HostCopies | None = None
    rows: dict[str, list[LogprobsRows]] = field(default_factory=dict)
    non_finite: set[str] = field(default_factory=set)
    _tiles: list[tuple[Callable[[], LogprobsTensors], list[_Run]]] = field(default_factory=list)

    def add(self, tensors: LogprobsTensors, runs: list[_Run]) -> None:
        """A dispatched tile."""
        if self.copies is None:
            self._tiles.append((lambda: tensors, runs))
        elif tensors.logprobs.shape[1] <= _WIDE:
            self._tiles.append((self.copies.start(tensors), runs))
        else:
            # Many rows as wide as the vocabulary would fill the device's memory.
            on_host = tensors.moved(Tensor.cpu)
            self._tiles.append((lambda: on_host, runs))

    def take(self) -> None:
        """Wait for the tiles and make their rows."""
        for wait, runs in self._tiles:
            lists = wait().tolists()
            finite = np.isfinite(lists.lse)
            for run in runs:
                self.rows.setdefault(run.req_id, []).append(LogprobsRows(lists, *run[1:]))
                if not finite[run.rows].all():
                    self.non_finite.add(run.req_id)
        self._tiles.clear()


class _Kind(NamedTuple):  # requests of one kind are read together
    many_topk: bool
    many_ids: bool
    entropy: bool
    ranks: bool


class _Request(NamedTuple):
    req_id: str
    ids: IdRows  # to read; one row: the same at all positions
    first_row: int  # position of the first row
    num_topk: int
    kind: _Kind

    def ids_at(self, positions: np.ndarray) -> IdRows:
        rows = positions - self.first_row if len(self.ids.ids) > 1 else np.zeros_like(positions)
        return IdRows(*(column[rows] for column in self.ids))


class PromptLogprobsState:
    """The slots whose requests read prompt positions, and the reading itself. Logits exist for one tile of positions at
    a time, so a prompt of any length needs `TILE_BYTES` for them."""

    def __init__(self, max_num_reqs: int, vocab_size: int, vocab: WholeVocab = WHOLE) -> None:
        self.vocab_size = vocab_size  # V, over all ranks
        self._vocab = vocab
        self.reading_clock = ReadingClock()
        self._requests: dict[int, _Request] = {}
        # By slot: positions in [first, next) have been read and those in [next, end) are still to be; the hidden states
        # of [first, end] are kept.
        self._first = np.full(max_num_reqs, _NONE, dtype=np.int64)  # [S]
        self._next = np.full(max_num_reqs, _NONE, dtype=np.int64)  # [S]
        self._end = np.zeros(max_num_reqs, dtype=np.int64)  # [S]

    def add_request(
        self, slot: int, req_id: str, params: SamplingParams, prompt_len: int, next_prompt_row: int | None
    ) -> None:
        """The request takes `slot`; `next_prompt_row` is the first position still to be read, if any."""
        self.remove_request(slot)
        if next_prompt_row is None:
            return
        num_topk = params.prompt_logprobs or 0
        num_topk = self.vocab_size if num_topk == -1 else min(num_topk, self.vocab_size)
        ids = readable(params.prompt_ids_np)
        kind = _Kind(num_topk > _WIDE, ids.ids.shape[1] > _WIDE, params.logprob_entropy, params.logprob_ranks)
        self._requests[slot] = _Request(req_id, ids, params.first_prompt_row or 0, num_topk, kind)
        self._first[slot] = self._next[slot] = next_prompt_row
        self._end[slot] = prompt_len - 1

    def add_run(self, slot: int, req_id: str, params: SamplingParams, start: int, end: int) -> None:
        """Positions [start, end) of generated tokens are to be read, as the request reads those that it samples."""
        num_topk = params.logprobs or 0
        num_topk = self.vocab_size if num_topk == -1 else min(num_topk, self.vocab_size)
        ids = readable(params.logprob_token_ids_np[None])
        kind = _Kind(num_topk > _WIDE, ids.ids.shape[1] > _WIDE, params.logprob_entropy, params.logprob_ranks)
        self._requests[slot] = _Request(req_id, ids, start, num_topk, kind)
        self._first[slot] = self._next[slot] = start
        self._end[slot] = end

    def remove_read(self, slots: np.ndarray) -> None:
        """Forget those of `slots` of which nothing is left to read."""
        for slot in slots[self._next[slots] >= self._end[slots]].tolist():
            self.remove_request(slot)

    def remove_request(self, slot: int) -> None:
        if self._requests.pop(slot, None) is not None:
            self._first[slot] = self._next[slot] = _NONE
            self._end[slot] = 0

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def take_rows(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions in [starts, ends) of each request (int [R]) that are still to be read, which then count as read:
        indices into the R requests and positions, both int64 [N], by request and position."""
        first = np.maximum(starts, self._next[slots])
        counts = np.maximum(np.minimum(ends, self._end[slots]) - first, 0)
        index = np.repeat(np.arange(len(slots), dtype=np.int64), counts)
        positions = np.arange(len(index), dtype=np.int64) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        self._next[slots] = np.where(counts > 0, first + counts, self._next[slots])
        return index, positions

    def reads(self, token_slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """bool [T]: tokens, given by slot and position, whose logits are still to be read."""
        return (self._next[token_slots] <= positions) & (positions < self._end[token_slots])

    def keeps_hidden(self, token_slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """bool [T]: prompt tokens, given by slot and position, whose final hidden states are needed: to be read now,
        and, kept beside the prefix cache, by later requests."""
        # `end` is the prompt's last token: it is not read here, but a longer prompt may read it.
        return (self._first[token_slots] <= positions) & (positions <= self._end[token_slots])

    def read(
        self,
        hidden: Tensor,
        rows: PromptRows,
        compute_logits: Callable[[Tensor, np.ndarray], Tensor],
        head_weight: Tensor | None,
        states: RequestStates,
        readings: PromptReadings,
    ) -> None:
        """Read positions from final hidden states, [M, H], and add them to `readings`. `compute_logits` returns this
        rank's logits, of rows with these slots; `head_weight`, [V, H], is given where they are its plain product with
        hidden states."""
        for part, num_topk, num_ids, kind in self._groups(rows):
            reads_ids = not (num_topk or kind.entropy) and num_ids <= _MOST_FUSED_IDS
            is_fused = reads_ids and has_linear_readings(hidden)
            weight = head_weight if is_fused else None
            size = num_tile_rows(self.vocab_size) if weight is None else _FUSED_ROWS
            for first in range(0, len(part.slots), size):
                tile = PromptRows(*(column[first : first + size] for column in part))
                ids, counts = self._ids_to_read(tile, states)
                chosen = hidden.index_select(0, upload(tile.sources, hidden.device))
                # No variable holds the logits here: they are freed before the next tile's are computed.
                tensors = self._read_tile(
                    compute_logits(chosen, tile.slots) if weight is None else chosen,
                    *(weight, ids, counts, num_topk, kind),
                )
                readings.add(tensors, self._runs(tile.slots, counts))

    def _groups(self, rows: PromptRows) -> Iterator[tuple[PromptRows, int, int, _Kind]]:
        """Rows of requests that are read together, with the greatest top-k and number of ids among them."""
        members: dict[_Kind, list[int]] = {}
        for slot in dict.fromkeys(rows.slots.tolist()):
            members.setdefault(self._requests[slot].kind, []).append(slot)
        for kind, slots in members.items():
            num_topk = max(self._requests[slot].num_topk for slot in slots)
            num_ids = max(self._requests[slot].ids.ids.shape[1] for slot in slots)
            part = rows
            if len(members) > 1:
                mine = np.isin(rows.slots, slots)
                part = PromptRows(*(column[mine] for column in rows))
            yield part, num_topk, num_ids, kind

    def _ids_to_read(self, tile: PromptRows, states: RequestStates) -> tuple[np.ndarray, np.ndarray]:
        """int32 [L, 1 + M]: each row's prompt token, then its requested ids; int32 [L]: how many of those it has."""
        borders = np.flatnonzero(tile.slots[1:] != tile.slots[:-1]) + 1
        parts = [
            (rows, self._requests[int(tile.slots[rows[0]])].ids_at(tile.positions[rows]))
            for rows in np.split(np.arange(len(tile.slots)), borders)
        ]
        counts = np.concatenate([own.counts for _, own in parts])
        ids = np.zeros((len(counts), 1 + int(counts.max(initial=0))), dtype=np.int32)
        ids[:, 0] = states.token_ids[tile.slots, tile.positions + 1]
        for rows, own in parts:
            width = min(own.ids.shape[1], ids.shape[1] - 1)
            ids[rows, 1 : 1 + width] = own.ids[:, :width]
        return ids, counts

    def _read_tile(
        self, source: Tensor, weight: Tensor | None, ids: np.ndarray, counts: np.ndarray, num_topk: int, kind: _Kind
    ) -> LogprobsTensors:
        """Readings [L, 1 + K + M] of a tile: the prompt token, the K most likely ones, the requested ids. `source` is
        the logits, or with the head's weight [V, H], and without K and entropy, hidden states [L, H]."""
        with self.reading_clock.running(source.device):
            named = columns = upload(ids, source.device)
            if num_topk:
                columns = torch.nn.functional.pad(named, (num_topk, 0))
            num_valid = None
            if counts.min() < ids.shape[1] - 1:
                num_valid = upload(counts + np.int32(1 + num_topk), source.device)
            if weight is None:
                readings = self._vocab.read(source, columns, num_topk, num_valid, kind.entropy, named[:, 0], kind.ranks)
            else:
                readings = linear_readings(source, weight, columns, num_valid, kind.ranks)._replace(token_ids=columns)
            return as_tensors(readings, num_valid, num_topk)

    def _runs(self, slots: np.ndarray, counts: np.ndarray) -> list[_Run]:
        starts = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist()]
        runs = []
        for start, stop in zip(starts, [*starts[1:], len(slots)], strict=True):
            own = counts[start:stop]
            most = int(own.max())
            padding = most * len(own) - int(own.sum())
            runs.append(_Run(self._requests[int(slots[start])].req_id, slice(start, stop), most, padding))
        return runs
