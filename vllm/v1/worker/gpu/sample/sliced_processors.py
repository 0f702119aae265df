"""Logits processors where every rank has a slice of the vocabulary: rank 0 has them, and runs them on whole rows.

Callables need not be picklable, may have state and need not be deterministic, so rank 0 alone runs them: the rows that
they need are gathered, and the results broadcast. On the other ranks `SamplingParams.logits_processors` holds
placeholders.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample.custom_processors import CustomProcessors, LogitsProcessorError
from vllm.v1.worker.gpu.sample.request_processors import RequestProcessorsState
from vllm.v1.worker.gpu.sample.vocab import WholeVocab
from vllm.v1.worker.gpu.sample.vocab_parallel import SlicedVocab
from vllm.v1.worker.gpu.states import RequestStates

Errors = dict[int, str]  # row -> message


def make_processors(
    config: VllmConfig, device: torch.device, vocab: WholeVocab
) -> tuple[RequestProcessorsState, CustomProcessors | SlicedCustomProcessors | None]:
    """The state of the requests' own processors, and the engine's custom ones, if it has any."""
    has_custom = bool(config.model_config.logits_processors)
    if isinstance(vocab, SlicedVocab):
        return SlicedRequestProcessors(vocab), SlicedCustomProcessors(config, device, vocab) if has_custom else None
    return RequestProcessorsState(), CustomProcessors(config, device) if has_custom else None


class SlicedRequestProcessors(RequestProcessorsState):
    """RequestProcessorsState with the callables, and the errors, on rank 0."""

    def __init__(self, vocab: SlicedVocab) -> None:
        super().__init__()
        self._vocab = vocab

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates) -> Errors:
        if not self.in_use:
            return {}
        rows = np.flatnonzero(self.uses(slots))
        run = super().apply
        return _on_rank_0(self._vocab, logits, rows, lambda whole: run(whole, slots[rows], states))


class SlicedCustomProcessors:
    """CustomProcessors, whose methods these are, on rank 0. `update_state` tells all ranks which rows they need; errors
    of requests are on rank 0, a LogitsProcessorError is raised on all ranks, with rank 0's message."""

    def __init__(self, config: VllmConfig, device: torch.device, vocab: SlicedVocab) -> None:
        self._vocab = vocab
        self._device = device
        self._processors = CustomProcessors(config, device) if vocab.slice.group.rank == 0 else None
        self._needs_all_rows = {True: False, False: False}  # by whether all rows are greedy
        self._touched = np.empty(0, dtype=bool)
        self.has_argmax_invariant = False

    def needs_all_rows(self, all_greedy: bool) -> bool:
        return self._needs_all_rows[all_greedy]

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return self._touched[slots]

    def add_request(self, slot: int, params: SamplingParams) -> None:
        if self._processors is not None:
            self._processors.add_request(slot, params)

    def remove_request(self, slot: int) -> None:
        if self._processors is not None:
            self._processors.remove_request(slot)

    def discard(self) -> None:
        if self._processors is not None:
            self._processors.discard()

    def update_state(self, slots: np.ndarray, states: RequestStates) -> None:
        error: LogitsProcessorError | None = None
        # Failed, needs_all_rows(True), needs_all_rows(False), has_argmax_invariant, touches(slots).
        update = np.zeros(4 + len(slots), dtype=np.int32)
        if self._processors is not None:
            try:
                self._processors.update_state(slots, states)
                needs = self._processors.needs_all_rows
                update[1:4] = needs(True), needs(False), self._processors.has_argmax_invariant
                update[4:] = self._processors.touches(slots)
            except LogitsProcessorError as raised:
                error, update[0] = raised, 1
        update = self._vocab.slice.group.broadcast(upload(update, self._device)).cpu().numpy()
        _raise_together(bool(update[0]), error)
        self._needs_all_rows = {True: bool(update[1]), False: bool(update[2])}
        self.has_argmax_invariant = bool(update[3])
        self._touched = np.zeros(int(slots.max()) + 1, dtype=bool)
        self._touched[slots] = update[4:].astype(bool)

    def apply(self, logits: Tensor, slots: np.ndarray) -> Errors:
        rows = np.flatnonzero(self._touched[slots] | self._needs_all_rows[True])

        def run(whole: Tensor) -> Errors:
            assert self._processors is not None
            return self._processors.apply(whole, slots[rows])

        return _on_rank_0(self._vocab, logits, rows, run)

    def apply_argmax_invariant(self, logits: Tensor, slots: np.ndarray, chosen: np.ndarray) -> Errors:
        if not (self.has_argmax_invariant and chosen.any()):
            return {}

        def run(whole: Tensor) -> Errors:
            assert self._processors is not None
            return self._processors.apply_argmax_invariant(whole, slots, chosen)

        return _on_rank_0(self._vocab, logits, np.arange(len(slots)), run)


def _on_rank_0(vocab: SlicedVocab, logits: Tensor, rows: np.ndarray, run: Callable[[Tensor], Errors]) -> Errors:
    """Let rank 0 process some of a workspace's rows in place: `run` gets them whole, float32 [G, V], and returns its
    errors by their number among these. Returns the errors by row of `logits`, on rank 0."""
    if not rows.size:
        return {}
    group = vocab.slice.group
    index = upload(rows, logits.device)
    whole = vocab.slice.gather_rows(logits[index])
    errors: Errors = {}
    error: LogitsProcessorError | None = None
    if group.rank == 0:
        try:
            errors = run(whole)
        except LogitsProcessorError as raised:
            error = raised
    has_failed = torch.full((1,), int(error is not None), dtype=torch.int32, device=logits.device)
    _raise_together(bool(group.broadcast(has_failed).item()), error)
    vocab.put_rows_(logits, index, group.broadcast(whole))
    return {int(rows[row]): message for row, message in errors.items()}


def _raise_together(has_failed: bool, error: LogitsProcessorError | None) -> None:
    if has_failed:
        raise error or LogitsProcessorError("a logits processor failed on rank 0")
