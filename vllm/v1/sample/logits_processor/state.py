"""The batch as custom processors see it: requests at indices without gaps, described by its changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import AddedRequest, BatchUpdate, MoveDirectionality, MovedRequest


class SlotTokens(Protocol):
    """The part of the runner's RequestStates that is read here, by slot."""

    prompt_len: np.ndarray  # int32 [S]
    total_len: np.ndarray  # int32 [S]
    token_ids: np.ndarray  # int32 [S, max_model_len]


class TokenLists:
    """The token ids of a slot's request as lists. `output` stays one object, which grows."""

    def __init__(self, slot: int, states: SlotTokens) -> None:
        self._slot = slot
        self._num_known = int(states.prompt_len[slot])
        prompt = states.token_ids[slot, : self._num_known]
        # Embeddings are no tokens.
        self.prompt: list[int] = prompt[prompt >= 0].tolist()
        self.output: list[int] = []
        self.sync(states)

    def sync(self, states: SlotTokens) -> None:
        """Append what has been generated since the last call."""
        num_tokens = int(states.total_len[self._slot])
        if num_tokens > self._num_known:
            self.output.extend(states.token_ids[self._slot, self._num_known : num_tokens].tolist())
            self._num_known = num_tokens


@dataclass
class _Row:
    slot: int
    params: SamplingParams
    tokens: TokenLists


class PersistentBatch:
    """Derives a batch without gaps from the runner's slots. A request joins at the first step in which it samples. It
    keeps its index until it is removed or moved: new requests take the indices of removed ones, the lowest first; the
    rest are filled with the last rows. A request that does not sample in a step keeps its index."""

    def __init__(self) -> None:
        self._rows: list[_Row | None] = []  # by index; None only between a removal and the next update
        self._index_of_slot: dict[int, int] = {}
        self._waiting: dict[int, SamplingParams] = {}  # slot -> parameters of a request that has not joined yet
        self._freed: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """The request takes `slot`; it joins when it first samples."""
        self._waiting[slot] = params

    def remove_request(self, slot: int) -> None:
        self._waiting.pop(slot, None)
        index = self._index_of_slot.pop(slot, None)
        if index is not None:
            self._rows[index] = None
            self._freed.append(index)

    def restart(self) -> None:
        """Empty the batch; every request in it joins again."""
        self._waiting.update({row.slot: row.params for row in self._rows if row is not None})
        self._rows.clear()
        self._index_of_slot.clear()
        self._freed.clear()

    def indices(self, slots: np.ndarray) -> np.ndarray:
        """int64 [R]: the indices of the requests in these slots (int [R], all joined)."""
        index_of = self._index_of_slot
        return np.fromiter((index_of[slot] for slot in slots.tolist()), dtype=np.int64, count=len(slots))

    def update(self, slots: np.ndarray, states: SlotTokens) -> BatchUpdate | None:
        """Advance the batch, and all output lists, to a step in which `slots` (int [R]) sample. Returns what changed
        since the last step; None when nothing did."""
        for row in self._rows:
            if row is not None:
                row.tokens.sync(states)
        freed = sorted(self._freed, reverse=True)
        self._freed.clear()
        added: list[AddedRequest] = []
        for slot in slots.tolist():
            if slot in self._waiting:
                index = freed.pop() if freed else len(self._rows)
                added.append(self._join(index, slot, states))
        removed = freed[::-1]
        moved = self._condense(removed)
        if not (removed or added or moved):
            return None
        return BatchUpdate(len(self._rows), removed, added, moved)

    def _join(self, index: int, slot: int, states: SlotTokens) -> AddedRequest:
        row = _Row(slot, self._waiting.pop(slot), TokenLists(slot, states))
        self._rows[index : index + 1] = [row]
        self._index_of_slot[slot] = index
        return index, row.params, row.tokens.prompt, row.tokens.output

    def _condense(self, holes: list[int]) -> list[MovedRequest]:
        """Fill the holes (ascending) with the last rows."""
        moved: list[MovedRequest] = []
        for hole in holes:
            while self._rows and self._rows[-1] is None:
                self._rows.pop()
            last = len(self._rows) - 1
            if hole >= last:
                break
            row = self._rows.pop()
            assert row is not None
            self._rows[hole] = row
            self._index_of_slot[row.slot] = hole
            moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
        return moved
