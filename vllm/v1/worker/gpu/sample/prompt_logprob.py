"""Readings of prompt positions: from final hidden states through the head, tile by tile; on CUDA, where nothing but
chosen tokens is wanted, in one operation that leaves no logits in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from vllm.logprobs.lists import LogprobsLists, LogprobsRows
from vllm.ops.linear_readings import has_linear_readings, linear_readings
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample.logprob import as_tensors
from vllm.v1.worker.gpu.sample.reading_clock import ReadingClock
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates

TILE_BYTES = 24 * 2**20
"""Logits of prompt positions that exist at one time, in float32: so many bytes, or one row where a row is larger. From
32 MiB on glibc would hand each tile's memory back, and every page of the next one would be a fault."""

NON_FINITE_PROMPT = "the model's logits are not finite (NaN or infinity) at a prompt position, so it cannot be read"

# Rows that want more than this are read apart from the others, which would otherwise pay for their width.
_WIDE = 128
_NONE = np.iinfo(np.int64).max
# Rows that are read at once where no logits come to be.
_FUSED_ROWS = 8192


def num_tile_rows(vocab_size: int) -> int:
    """Rows of float32 logits in a tile."""
    return max(1, TILE_BYTES // (4 * vocab_size))


class PromptRows(NamedTuple):
    """N prompt positions to read, those of a request together and in order."""

    slots: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N]; the token read is the one after it
    sources: np.ndarray  # int64 [N], row of the matrix of hidden states


@dataclass
class PromptReadings:
    """What a step read of prompts."""

    rows: dict[str, list[LogprobsRows]] = field(default_factory=dict)  # by request, in the order of positions
    non_finite: set[str] = field(default_factory=set)  # requests with a position whose logits are not finite


class _Kind(NamedTuple):
    """Requests of one kind are read together."""

    many_topk: bool
    many_ids: bool
    entropy: bool


class _Request(NamedTuple):
    req_id: str
    params: SamplingParams
    num_topk: int
    kind: _Kind


class PromptLogprobsState:
    """The slots whose requests read prompt positions, and the reading itself.

    A position's logits are computed for a tile of rows at a time and dropped when they have been read, so a prompt of
    any length needs `TILE_BYTES` for them.
    """

    def __init__(self, max_num_reqs: int, vocab_size: int, vocab: WholeVocab = WHOLE) -> None:
        """
        Args:
            vocab_size: V, over all ranks.
            vocab: how this rank's logits are read.
        """
        self.vocab_size = vocab_size
        self._vocab = vocab
        self.reading_clock = ReadingClock()
        self._requests: dict[int, _Request] = {}
        # Of each slot: the first position whose hidden state is kept, the first that is still to be read, and the end
        # of those that are read. Positions from `first` on that are before `next` have been read.
        self._first = np.full(max_num_reqs, _NONE, dtype=np.int64)  # [S]
        self._next = np.full(max_num_reqs, _NONE, dtype=np.int64)  # [S]
        self._end = np.zeros(max_num_reqs, dtype=np.int64)  # [S]

    def add_request(
        self, slot: int, req_id: str, params: SamplingParams, prompt_len: int, next_prompt_row: int | None
    ) -> None:
        """The request takes `slot`; `next_prompt_row` is the first position that it still wants read, if any."""
        self.remove_request(slot)
        if next_prompt_row is None:
            return
        num_topk = params.prompt_logprobs or 0
        num_topk = self.vocab_size if num_topk == -1 else min(num_topk, self.vocab_size)
        ids = params.prompt_logprob_token_ids or ()
        widest = max(map(len, ids)) if params.has_prompt_ids_a_position else len(ids)  # type: ignore[arg-type]
        kind = _Kind(num_topk > _WIDE, widest > _WIDE, params.logprob_entropy)
        self._requests[slot] = _Request(req_id, params, num_topk, kind)
        self._first[slot] = self._next[slot] = next_prompt_row
        self._end[slot] = prompt_len - 1

    def remove_request(self, slot: int) -> None:
        """The slot's request is gone."""
        if self._requests.pop(slot, None) is not None:
            self._first[slot] = self._next[slot] = _NONE
            self._end[slot] = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request reads its prompt."""
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

    def keeps_hidden(self, token_slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """bool [T]: prompt tokens, given by slot and position, whose final hidden states are wanted: to be read now,
        and, kept beside the prefix cache, by later requests."""
        # `end` is the prompt's last token: nobody reads it here, but a longer prompt may.
        return (self._first[token_slots] <= positions) & (positions <= self._end[token_slots])

    def read(
        self,
        hidden: torch.Tensor,
        rows: PromptRows,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        head_weight: torch.Tensor | None,
        states: RequestStates,
        readings: PromptReadings,
    ) -> None:
        """Read positions and add them to `readings`.

        Args:
            hidden: [M, H] final hidden states.
            compute_logits: [L, H] -> this rank's logits, float32 [L, V] where it is alone.
            head_weight: [V, H] where logits are its plain product with hidden states; else None.
            states: token ids by slot.
        """
        for part, num_topk, kind in self._groups(rows):
            weight = head_weight if not (num_topk or any(kind)) and has_linear_readings(hidden) else None
            size = num_tile_rows(self.vocab_size) if weight is None else _FUSED_ROWS
            for first in range(0, len(part.slots), size):
                tile = PromptRows(*(column[first : first + size] for column in part))
                ids, counts = self._ids_to_read(tile, states)
                chosen = hidden.index_select(0, upload(tile.sources, hidden.device))
                if weight is None:
                    # No name holds the logits: they are gone before the next tile's are made.
                    lists = self._read_tile(compute_logits(chosen), ids, counts, num_topk, kind.entropy)
                else:
                    lists = self._read_fused(chosen, weight, ids, counts)
                self._hand_out(tile.slots, counts, lists, readings)

    def _groups(self, rows: PromptRows) -> Iterator[tuple[PromptRows, int, _Kind]]:
        """Rows of requests that are read together, with the greatest top-k among them."""
        members: dict[_Kind, list[int]] = {}
        for slot in dict.fromkeys(rows.slots.tolist()):
            members.setdefault(self._requests[slot].kind, []).append(slot)
        for kind, slots in members.items():
            num_topk = max(self._requests[slot].num_topk for slot in slots)
            if len(members) > 1:
                mine = np.isin(rows.slots, slots)
                yield PromptRows(*(column[mine] for column in rows)), num_topk, kind
            else:
                yield rows, num_topk, kind

    def _ids_to_read(self, tile: PromptRows, states: RequestStates) -> tuple[np.ndarray, np.ndarray]:
        """int32 [L, 1 + M]: each row's prompt token, then its requested ids; int32 [L]: how many of those it has."""
        lists = [
            self._requests[slot].params.prompt_token_ids_of(position)
            for slot, position in zip(tile.slots.tolist(), tile.positions.tolist(), strict=True)
        ]
        counts = np.fromiter(map(len, lists), dtype=np.int32, count=len(lists))
        ids = np.zeros((len(lists), 1 + int(counts.max(initial=0))), dtype=np.int32)
        ids[:, 0] = states.token_ids[tile.slots, tile.positions + 1]
        for row, own in enumerate(lists):
            ids[row, 1 : 1 + len(own)] = own
        return ids, counts

    def _read_tile(
        self, logits: torch.Tensor, ids: np.ndarray, counts: np.ndarray, num_topk: int, entropy: bool
    ) -> LogprobsLists:
        """Readings [L, 1 + K + M] of a tile: the prompt token, the K most likely ones, the requested ids."""
        with self.reading_clock.running(logits.device):
            wanted = upload(ids, logits.device)
            columns = torch.nn.functional.pad(wanted, (num_topk, 0)) if num_topk else wanted
            num_valid = None
            if counts.min() < ids.shape[1] - 1:
                num_valid = upload(counts + np.int32(1 + num_topk), logits.device)
            readings = self._vocab.read(logits, columns, num_topk, num_valid, entropy, wanted[:, 0])
            tensors = as_tensors(readings, num_valid, num_topk)
        return tensors.tolists()

    def _read_fused(
        self, hidden: torch.Tensor, weight: torch.Tensor, ids: np.ndarray, counts: np.ndarray
    ) -> LogprobsLists:
        """Readings [L, 1 + M] of hidden states [L, H], through the head's weight [V, H]."""
        with self.reading_clock.running(hidden.device):
            columns = upload(ids, hidden.device)
            num_valid = None
            if counts.min() < ids.shape[1] - 1:
                num_valid = upload(counts + np.int32(1), hidden.device)
            readings = linear_readings(hidden, weight, columns, num_valid)
            tensors = as_tensors(readings._replace(token_ids=columns), num_valid, 0)
        return tensors.tolists()

    def _hand_out(self, slots: np.ndarray, counts: np.ndarray, lists: LogprobsLists, readings: PromptReadings) -> None:
        """Give each request its runs of rows that hold equally many ids."""
        borders = np.flatnonzero((slots[1:] != slots[:-1]) | (counts[1:] != counts[:-1])) + 1
        starts = [0, *borders.tolist()]
        for start, stop in zip(starts, [*starts[1:], len(slots)], strict=True):
            req_id = self._requests[int(slots[start])].req_id
            own = readings.rows.setdefault(req_id, [])
            own.append(LogprobsRows(lists, slice(start, stop), int(counts[start])))
        for row in np.flatnonzero(~np.isfinite(lists.lse)).tolist():
            readings.non_finite.add(self._requests[int(slots[row])].req_id)
