"""Biases and masks on chosen tokens: allowed_token_ids, logit_bias, min_tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedTensor, upload
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates


class _Lists:
    """A list of numbers a slot, as a padded table that grows.

    Padding repeats a row's first entry: every operation here writes one value per token id, so writing the first one
    again changes nothing and no step needs a mask.
    """

    def __init__(self, max_num_reqs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count = np.zeros(max_num_reqs, dtype=np.int32)  # [S]
        self.table = StagedTensor((max_num_reqs, 4), dtype, device)

    def set_row(self, slot: int, entries: Sequence[int] | Sequence[float]) -> None:
        self.count[slot] = len(entries)
        if not entries:
            return
        old_width = self.table.np.shape[1]
        self.table.ensure_width(len(entries))
        width = self.table.np.shape[1]
        if width > old_width:
            self._pad_new_columns(old_width)
        row = np.full(width, entries[0], dtype=self.table.np.dtype)
        row[: len(entries)] = entries
        self.table.stage(slot, row)

    def _pad_new_columns(self, old_width: int) -> None:
        for slot in np.flatnonzero(self.count).tolist():
            row = self.table.np[slot].copy()
            row[old_width:] = row[0]
            self.table.stage(slot, row)

    def gather(self, slots: np.ndarray) -> Tensor:
        """[R, W] on the device, W = the longest list among `slots` (int [R], each with a list)."""
        index = upload(slots, self.table.device)
        return self.table.tensor[index, : int(self.count[slots].max())]


class LogitBiasState:
    """What a request adds to, or forbids among, the logits, by slot. Applied in upstream's order: allowed_token_ids,
    then logit_bias, then min_tokens; penalties and temperature come after."""

    def __init__(
        self,
        max_num_reqs: int,
        device: torch.device,
        eos_token_ids: Collection[int] = (),
        vocab: WholeVocab = WHOLE,
    ) -> None:
        """min_tokens forbids the model's `eos_token_ids` beside the request's stop_token_ids."""
        self._vocab = vocab
        self._eos_token_ids = list(eos_token_ids)
        self._allowed_ids = _Lists(max_num_reqs, torch.int64, device)
        self._bias_ids = _Lists(max_num_reqs, torch.int64, device)
        self._bias_values = _Lists(max_num_reqs, torch.float32, device)
        self._stop_ids = _Lists(max_num_reqs, torch.int64, device)
        self._min_tokens = np.zeros(max_num_reqs, dtype=np.int32)  # [S]

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Stage the lists of the request that takes `slot`; empty ones replace the last request's too."""
        bias = params.logit_bias or {}
        self._allowed_ids.set_row(slot, params.allowed_token_ids or ())
        self._bias_ids.set_row(slot, list(bias))
        self._bias_values.set_row(slot, list(bias.values()))
        stop_ids = [*self._eos_token_ids, *(params.stop_token_ids or ())] if params.min_tokens else []
        self._stop_ids.set_row(slot, stop_ids)
        self._min_tokens[slot] = params.min_tokens if stop_ids else 0

    def apply_staged_writes(self) -> None:
        """Make the staged rows visible to device code."""
        for lists in (self._allowed_ids, self._bias_ids, self._bias_values, self._stop_ids):
            lists.table.apply_staged_writes()

    def uses(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        """bool [R]: rows that anything applies to at this position."""
        listed = (self._allowed_ids.count[slots] > 0) | (self._bias_ids.count[slots] > 0)
        return listed | self._may_not_stop(slots, states)

    def _may_not_stop(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        return states.total_len[slots] - states.prompt_len[slots] < self._min_tokens[slots]

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates) -> None:
        """Mask and bias rows of a workspace, float32 [R, V], in place."""
        for rows, step in (
            (self._allowed_ids.count[slots] > 0, self._apply_allowed),
            (self._bias_ids.count[slots] > 0, self._apply_bias),
            (self._may_not_stop(slots, states), self._apply_min_tokens),
        ):
            if rows.any():
                index = upload(np.flatnonzero(rows), logits.device)[:, None]
                step(logits, index, slots[rows])

    # Each of these: logits [R, V], index int64 [G, 1] of the rows that it changes, their slots int [G].

    def _apply_allowed(self, logits: Tensor, index: Tensor, slots: np.ndarray) -> None:
        at = (index, self._vocab.columns(self._allowed_ids.gather(slots)))
        allowed = logits[at]
        logits.index_fill_(0, index.squeeze(1), -torch.inf)
        logits[at] = allowed

    def _apply_bias(self, logits: Tensor, index: Tensor, slots: np.ndarray) -> None:
        at = (index, self._vocab.columns(self._bias_ids.gather(slots)))
        # Not an accumulating add: the padding must not add the first entry's bias again.
        logits[at] = logits[at] + self._bias_values.gather(slots)

    def _apply_min_tokens(self, logits: Tensor, index: Tensor, slots: np.ndarray) -> None:
        logits[index, self._vocab.columns(self._stop_ids.gather(slots))] = -torch.inf
