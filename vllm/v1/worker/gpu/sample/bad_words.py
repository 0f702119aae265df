"""bad_words: token sequences that a request must not complete."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates

# Not token ids: they pad a short sequence, and what precedes the first generated token.
_ANYTHING, _NOTHING = -1, -2


class BadWordsState:
    """The sequences of every slot that has any."""

    def __init__(self, vocab: WholeVocab = WHOLE) -> None:
        self._vocab = vocab
        self._sequences: dict[int, _Sequences] = {}

    @property
    def in_use(self) -> bool:
        """Whether any slot has bad words."""
        return bool(self._sequences)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Keep the sequences of the request that takes `slot`."""
        self.remove_request(slot)
        if params.bad_words_token_ids:
            self._sequences[slot] = _Sequences(params.bad_words_token_ids)

    def remove_request(self, slot: int) -> None:
        """Drop the slot's sequences."""
        self._sequences.pop(slot, None)

    def uses(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: rows with bad words."""
        return np.fromiter((slot in self._sequences for slot in slots.tolist()), dtype=bool, count=len(slots))

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates) -> None:
        """Set to -inf, in a workspace, float32 [R, V], the tokens that would complete a sequence."""
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
