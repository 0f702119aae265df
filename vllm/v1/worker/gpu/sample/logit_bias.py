"""Biases and masks on chosen tokens: allowed_token_ids, logit_bias, min_tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedTensor, upload

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.states import RequestStates


class _IdLists:
    """A list of token ids a slot, optionally with a value for each, as a padded table that grows.

    Padding repeats a row's first entry: every operation here writes per token id, so writing the first one again changes
    nothing and no step needs a mask.
    """

    def __init__(self, max_num_reqs: int, device: torch.device, with_values: bool = False) -> None:
        self.count = np.zeros(max_num_reqs, dtype=np.int32)  # [S]
        self.ids = StagedTensor((max_num_reqs, 4), torch.int64, device)
        self.values = StagedTensor((max_num_reqs, 4), torch.float32, device) if with_values else None

    def set_row(self, slot: int, ids: Sequence[int], values: Sequence[float] = ()) -> None:
        self.count[slot] = len(ids)
        if not ids:
            return
        tables: list[tuple[StagedTensor, Sequence[int] | Sequence[float]]] = [(self.ids, ids)]
        if self.values is not None:
            tables.append((self.values, values))
        for table, entries in tables:
            width = table.np.shape[1]
            table.ensure_width(len(ids))
            if table.np.shape[1] != width:
                self._pad_new_columns(table, width)
            row = np.full(table.np.shape[1], entries[0], dtype=table.np.dtype)
            row[: len(entries)] = entries
            table.stage(slot, row)

    def _pad_new_columns(self, table: StagedTensor, old_width: int) -> None:
        for slot in np.flatnonzero(self.count):
            row = table.np[slot].copy()
            row[old_width:] = row[0]
            table.stage(slot, row)

    def apply_staged_writes(self) -> None:
        self.ids.apply_staged_writes()
        if self.values is not None:
            self.values.apply_staged_writes()

    def gather(self, slots: np.ndarray, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids int64 [R, W] and values float32 [R, W] of some slots, W = the longest list among them."""
        width = int(self.count[slots].max())
        values = None if self.values is None else self.values.tensor[index, :width]
        return self.ids.tensor[index, :width], values


class LogitBiasState:
    """What a request adds to, or forbids among, the logits, by slot. Applied in upstream's order: allowed_token_ids,
    then logit_bias, then min_tokens; penalties and temperature come after."""

    def __init__(self, max_num_reqs: int, device: torch.device, eos_token_ids: Collection[int] = ()) -> None:
        """
        Args:
            eos_token_ids: the model's; min_tokens forbids them, beside the request's stop_token_ids.
        """
        self._eos_token_ids = list(eos_token_ids)
        self._allowed = _IdLists(max_num_reqs, device)
        self._bias = _IdLists(max_num_reqs, device, with_values=True)
        self._stops = _IdLists(max_num_reqs, device)
        self._min_tokens = np.zeros(max_num_reqs, dtype=np.int32)  # [S]

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Stage the lists of the request that takes `slot`; empty ones replace the last owner's too."""
        bias = params.logit_bias or {}
        self._allowed.set_row(slot, params.allowed_token_ids or ())
        self._bias.set_row(slot, list(bias), list(bias.values()))
        stops = [*self._eos_token_ids, *(params.stop_token_ids or ())] if params.min_tokens else []
        self._stops.set_row(slot, stops)
        self._min_tokens[slot] = params.min_tokens if stops else 0

    def apply_staged_writes(self) -> None:
        """Make the staged rows visible to device code."""
        for lists in (self._allowed, self._bias, self._stops):
            lists.apply_staged_writes()

    def uses(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        """bool [R]: rows that anything applies to at this position."""
        listed = (self._allowed.count[slots] > 0) | (self._bias.count[slots] > 0)
        return listed | self._may_not_stop(slots, states)

    def _may_not_stop(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        return states.total_len[slots] - states.prompt_len[slots] < self._min_tokens[slots]

    def apply(self, logits: torch.Tensor, slots: np.ndarray, states: RequestStates) -> None:
        """Mask and bias in place.

        Args:
            logits: float32 [R, V].
            slots: int [R].
            states: lengths by slot, for min_tokens.
        """
        self._apply_allowed(logits, slots)
        self._apply_bias(logits, slots)
        self._apply_min_tokens(logits, slots, states)

    def _apply_allowed(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        rows = np.flatnonzero(self._allowed.count[slots])
        if not rows.size:
            return
        ids, _ = self._allowed.gather(slots[rows], upload(slots[rows], logits.device))
        index = upload(rows, logits.device)
        at = (index[:, None], ids)
        allowed = logits[at]
        logits.index_fill_(0, index, -torch.inf)
        logits[at] = allowed

    def _apply_bias(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        rows = np.flatnonzero(self._bias.count[slots])
        if not rows.size:
            return
        ids, values = self._bias.gather(slots[rows], upload(slots[rows], logits.device))
        at = (upload(rows, logits.device)[:, None], ids)
        # Not an accumulating add: the padding must not add the first entry's bias again.
        logits[at] = logits[at] + values

    def _apply_min_tokens(self, logits: torch.Tensor, slots: np.ndarray, states: RequestStates) -> None:
        rows = np.flatnonzero(self._may_not_stop(slots, states))
        if not rows.size:
            return
        ids, _ = self._stops.gather(slots[rows], upload(slots[rows], logits.device))
        logits[upload(rows, logits.device)[:, None], ids] = -torch.inf
