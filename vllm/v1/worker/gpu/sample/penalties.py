"""Penalties on tokens that a request has already seen."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedTensor, upload, upload_all
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates


class TokenHistory:
    """The token ids of the slots that use penalties, on the device. A step uploads those that are not there yet, of
    which the last may be known to the device alone. It grows by powers of two, and no slot's memory is given back."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._table = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._row_of_slot = np.full(max_num_reqs, -1, dtype=np.int64)  # [S]
        self._num_rows = 0
        # The number of the request whose tokens a slot's row holds, and how many.
        self._owners = np.zeros(max_num_reqs, dtype=np.int64)  # [S]
        self._num_tokens = np.zeros(max_num_reqs, dtype=np.int32)  # [S]

    def rows(self, slots: np.ndarray, states: RequestStates) -> Tensor:
        """int32 [R, max total_len among `slots` (int64 [R], distinct)]; beyond a row's own length undefined ids."""
        lengths = states.total_len[slots]
        width = int(lengths.max(initial=0))
        self._make_room(slots, width)
        starts = np.where(self._owners[slots] == states.owners[slots], self._num_tokens[slots], 0)
        self._owners[slots], self._num_tokens[slots] = states.owners[slots], lengths
        counts = lengths - starts
        if counts.any():
            token_slots = np.repeat(slots, counts)
            positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - starts, counts)
            places = self._row_of_slot[token_slots] * self._table.shape[1] + positions
            arrays = [places, token_slots, states.token_ids[token_slots, positions]]
            where, owners, token_ids = upload_all(arrays, self._table.device)
            if states.last_sampled is not None:
                token_ids = states.known(token_ids, owners)
            self._table.view(-1).index_copy_(0, where, token_ids)
        return self._table[:, :width].index_select(0, upload(self._row_of_slot[slots], self._table.device))

    def _make_room(self, slots: np.ndarray, width: int) -> None:
        new = slots[self._row_of_slot[slots] < 0]
        self._row_of_slot[new] = np.arange(self._num_rows, self._num_rows + len(new))
        self._num_rows += len(new)
        rows, columns = self._table.shape
        if self._num_rows > rows or width > columns:
            wider = self._table.new_zeros(max(rows, _power_of_two(self._num_rows)), max(columns, _power_of_two(width)))
            wider[:rows, :columns] = self._table
            self._table = wider


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


class PenaltiesState:
    """Repetition (over prompt and output), frequency and presence (over output alone) penalties by slot. Counts are
    taken from the request's token ids at every step instead of being kept, so none can be stale after a preemption or
    in a reused slot."""

    def __init__(self, max_num_reqs: int, device: torch.device, vocab: WholeVocab = WHOLE) -> None:
        self._vocab = vocab
        self.repetition = StagedTensor(max_num_reqs, torch.float32, device, fill=1.0)
        self.frequency = StagedTensor(max_num_reqs, torch.float32, device)
        self.presence = StagedTensor(max_num_reqs, torch.float32, device)
        # On the CPU the request's token ids are there.
        self._history = None if device.type == "cpu" else TokenHistory(max_num_reqs, device)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self.repetition.stage(slot, params.repetition_penalty)
        self.frequency.stage(slot, params.frequency_penalty)
        self.presence.stage(slot, params.presence_penalty)

    def apply_staged_writes(self) -> None:
        for table in (self.repetition, self.frequency, self.presence):
            table.apply_staged_writes()

    def uses(self, slots: np.ndarray) -> np.ndarray:
        counted = (self.frequency.np[slots] != 0.0) | (self.presence.np[slots] != 0.0)
        return counted | (self.repetition.np[slots] != 1.0)

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates) -> None:
        device = logits.device
        index = upload(slots, device)
        token_ids = states.token_ids_tensor(slots) if self._history is None else self._history.rows(slots, states)
        columns = self._vocab.columns(token_ids.clamp(min=0).to(torch.int64))  # [R, W]
        position = torch.arange(columns.shape[1], device=device)
        known = position < upload(states.total_len[slots], device)[:, None]  # the rest is padding, or stale
        known &= token_ids >= 0
        generated = known & (position >= upload(states.prompt_len[slots], device)[:, None])

        # A new value depends on its token alone, so a token at several positions (known or stale) is written several
        # times with one value, and no other token of the vocabulary is touched.
        values = logits.gather(1, columns)
        seen = _occurrences(columns, known, logits.shape[1]) > 0
        repetition = self.repetition.tensor[index][:, None]
        values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
        count = _occurrences(columns, generated, logits.shape[1])
        values -= self.frequency.tensor[index][:, None] * count
        values -= self.presence.tensor[index][:, None] * (count > 0)
        logits.scatter_(1, columns, values)


def _occurrences(columns: Tensor, counted: Tensor, num_columns: int) -> Tensor:
    """float32 [R, W]: how often each position's column occurs at the row's `counted` (bool [R, W]) positions. Exact:
    counts stay far below 2**24."""
    counts = torch.zeros((len(columns), num_columns), dtype=torch.float32, device=columns.device)
    counts.scatter_add_(1, columns, counted.to(torch.float32))
    return counts.gather(1, columns)
