"""Biases and masks on chosen tokens: allowed_token_ids, logit_bias, min_tokens, bad_words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedTensor, upload
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates

# Not token ids: they pad a short sequence, and what precedes the first generated token.
_ANYTHING, _NOTHING = -1, -2


class _Lists:
    """A list of numbers a slot, as a padded table that grows. Padding repeats a row's first entry: every operation here
    writes one value per token id, so writing the first one again changes nothing and no step needs a mask."""

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
            for other in np.flatnonzero(self.count).tolist():
                own = self.table.np[other].copy()
                own[old_width:] = own[0]
                self.table.stage(other, own)
        row = np.full(width, entries[0], dtype=self.table.np.dtype)
        row[: len(entries)] = entries
        self.table.stage(slot, row)

    def gather(self, slots: np.ndarray) -> Tensor:
        """[R, W] on the device, W = the longest list among `slots` (int [R], each with a list)."""
        index = upload(slots, self.table.device)
        return self.table.tensor[index, : int(self.count[slots].max())]


class LogitBiasState:
    """Additions to the logits and tokens that are forbidden among them, by slot. Applied in upstream's order:
    allowed_token_ids, then logit_bias, then min_tokens; penalties and temperature come after."""

    def __init__(
        self, max_num_reqs: int, device: torch.device, eos_token_ids: Collection[int] = (), vocab: WholeVocab = WHOLE
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
        for lists in (self._allowed_ids, self._bias_ids, self._bias_values, self._stop_ids):
            lists.table.apply_staged_writes()

    def uses(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        listed = (self._allowed_ids.count[slots] > 0) | (self._bias_ids.count[slots] > 0)
        return listed | self.may_not_stop(slots, states)

    def may_not_stop(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        """bool [R]: rows that have not reached their min_tokens."""
        return states.total_len[slots] - states.prompt_len[slots] < self._min_tokens[slots]

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates, may_stop: np.ndarray) -> None:
        """In place, [R, V]. `may_stop`: bool [R], rows that must stop whatever min_tokens says."""
        for rows, step in (
            (self._allowed_ids.count[slots] > 0, self._apply_allowed),
            (self._bias_ids.count[slots] > 0, self._apply_bias),
            (self.may_not_stop(slots, states) & ~may_stop, self._apply_min_tokens),
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


class BadWordsState:
    def __init__(self, vocab: WholeVocab = WHOLE) -> None:
        self._vocab = vocab
        self._sequences: dict[int, _Sequences] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._sequences)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self.remove_request(slot)
        if params.bad_words_token_ids:
            self._sequences[slot] = _Sequences(params.bad_words_token_ids)

    def remove_request(self, slot: int) -> None:
        self._sequences.pop(slot, None)

    def uses(self, slots: np.ndarray) -> np.ndarray:
        return np.fromiter((slot in self._sequences for slot in slots.tolist()), dtype=bool, count=len(slots))

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates) -> None:
        if not self.in_use:
            return
        rows = np.flatnonzero(self.uses(slots))
        ids = [
            self._sequences[slot].completing(states.token_ids[slot, states.prompt_len[slot] : states.total_len[slot]])
            for slot in slots[rows].tolist()
        ]
        if ids:
            row_of_id = np.repeat(rows, [len(own) for own in ids])
            columns = self._vocab.columns(upload(np.concatenate(ids), logits.device))
            logits[upload(row_of_id, logits.device), columns] = -torch.inf


class _Sequences:
    """W sequences as tables, all compared with the end of the generated tokens at once."""

    def __init__(self, sequences: list[list[int]]) -> None:
        longest = max(len(sequence) for sequence in sequences) - 1
        self._last = np.array([sequence[-1] for sequence in sequences], dtype=np.int64)  # [W]
        self._before = np.full((len(sequences), longest), _ANYTHING, dtype=np.int32)  # [W, longest], right-aligned
        for row, sequence in zip(self._before, sequences, strict=True):
            row[longest - len(sequence) + 1 :] = sequence[:-1]

    def completing(self, generated: np.ndarray) -> np.ndarray:
        """int64: the tokens that would complete a sequence, after these (int [G])."""
        longest = self._before.shape[1]
        if not longest:
            return self._last
        end = np.full(longest, _NOTHING, dtype=np.int32)
        num_compared = min(longest, len(generated))
        end[longest - num_compared :] = generated[len(generated) - num_compared :]
        matches = (self._before == end) | (self._before == _ANYTHING)
        return self._last[matches.all(axis=1)]
