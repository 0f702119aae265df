"""Logits processors over the slots: those of single requests, and the engine's custom ones. Where every rank has a
slice of the vocabulary, rank 0 alone has processors, and runs them on whole rows: callables need not be picklable, may
have state and need not be deterministic. The rows that they need are gathered, and the results broadcast. On the other
ranks `SamplingParams.logits_processors` holds placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.logits_processor.loading import ProcessorClass
from vllm.v1.sample.logits_processor.request import (
    AdapterLogitsProcessor,
    BoundProcessor,
    RequestProcessorsFailed,
    check_result,
    failure_message,
    processor_name,
)
from vllm.v1.sample.logits_processor.slots import SlotAdapter, SlotLogitsProcessor
from vllm.v1.sample.logits_processor.state import PersistentBatch, TokenLists
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample.vocab import WholeVocab
from vllm.v1.worker.gpu.sample.vocab_parallel import SlicedVocab
from vllm.v1.worker.gpu.states import RequestStates

Errors = dict[int, str]  # row -> message


class LogitsProcessorError(RuntimeError):
    """A processor of the whole batch failed; the message names it."""


def make_processors(
    config: VllmConfig, device: torch.device, vocab: WholeVocab
) -> tuple[RequestProcessorsState, CustomProcessors | None]:
    """The state of the requests' processors, and the engine's custom ones, if it has any."""
    has_custom = bool(config.model_config.logits_processors)
    if isinstance(vocab, SlicedVocab):
        return SlicedRequestProcessors(vocab), SlicedCustomProcessors(config, device, vocab) if has_custom else None
    return RequestProcessorsState(), CustomProcessors(config, device) if has_custom else None


class RequestProcessorsState:
    def __init__(self) -> None:
        self._callables: dict[int, list[Callable[..., Any]]] = {}
        self._bound: dict[int, tuple[TokenLists, list[BoundProcessor]]] = {}  # of those that have sampled

    @property
    def in_use(self) -> bool:
        return bool(self._callables)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self.remove_request(slot)
        if params.logits_processors:
            self._callables[slot] = params.logits_processors

    def remove_request(self, slot: int) -> None:
        self._callables.pop(slot, None)
        self._bound.pop(slot, None)

    def uses(self, slots: np.ndarray) -> np.ndarray:
        return np.fromiter((slot in self._callables for slot in slots.tolist()), dtype=bool, count=len(slots))

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates) -> Errors:
        """Process float32 [R, V] in place, each row by its request's callables in their order. Rows whose callable
        raised or returned no logits are in the errors and undefined."""
        errors: Errors = {}
        if not self.in_use:
            return errors
        for row, slot in enumerate(slots.tolist()):
            for processor in self._processors(slot, states):
                try:
                    processor.apply(logits[row])
                except Exception as error:
                    errors[row] = failure_message(processor.name, error)
                    break
        return errors

    def _processors(self, slot: int, states: RequestStates) -> list[BoundProcessor]:
        if slot not in self._callables:
            return []
        if slot not in self._bound:
            tokens = TokenLists(slot, states)
            bound = [BoundProcessor(each, tokens.prompt, tokens.output) for each in self._callables[slot]]
            self._bound[slot] = tokens, bound
        tokens, processors = self._bound[slot]
        tokens.sync(states)
        return processors


class CustomProcessors:
    """The engine's custom processors and the batch that they see. Once one of them has failed, the state of all is
    undefined: `discard` drops them, and the next step builds new ones and adds every request again. Every method that
    builds or runs them raises LogitsProcessorError."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._batch = PersistentBatch()
        self._processors: list[LogitsProcessor] | None = None
        self._build()

    def needs_all_rows(self, all_greedy: bool) -> bool:
        """Whether a processor needs the whole batch in this step, not single rows of it."""
        runs = self._others if all_greedy else [*self._others, *self._invariant]
        return not all(_acts_by_row(processor) for processor in runs)

    def touches(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: rows whose most likely token a processor may change, where none needs all rows."""
        touched = {index for processor in self._others if _acts_by_row(processor) for index in processor.req_info}
        indices = self._batch.indices(slots).tolist()
        return np.fromiter((index in touched for index in indices), dtype=bool, count=len(slots))

    @property
    def has_argmax_invariant(self) -> bool:
        return bool(self._invariant)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self._batch.add_request(slot, params)

    def remove_request(self, slot: int) -> None:
        self._batch.remove_request(slot)

    def discard(self) -> None:
        """Drop all processors and their state."""
        self._processors = None
        self._batch.restart()

    def update_state(self, slots: np.ndarray, states: RequestStates) -> None:
        """Update the processors for the step in which these slots (int [R]) sample."""
        if self._processors is None:
            self._build()
        update = self._batch.update(slots, states)
        for processor in self._processors or ():
            try:
                processor.update_state(update)
            except Exception as error:
                raise _failure(processor, error) from error

    def apply(self, logits: Tensor, slots: np.ndarray) -> Errors:
        """Run the processors that may change the most likely token on float32 [R, V], in place. The errors are of
        rows whose request's processor failed."""
        return self._run(self._others, logits, slots, np.ones(len(slots), dtype=bool))

    def apply_argmax_invariant(self, logits: Tensor, slots: np.ndarray, chosen: np.ndarray) -> Errors:
        """Like `apply`, with the other processors, on the `chosen` rows (bool [R]) only."""
        return self._run(self._invariant, logits, slots, chosen) if chosen.any() else {}

    def _build(self) -> None:
        invariant: list[LogitsProcessor] = []
        others: list[LogitsProcessor] = []
        for cls in self._config.model_config.logits_processors:
            try:
                processor = self._make(cls)
                (invariant if processor.is_argmax_invariant() else others).append(processor)
            except Exception as error:
                raise _failure(cls, error) from error
        self._invariant, self._others = invariant, others
        self._processors = [*others, *invariant]

    def _make(self, cls: ProcessorClass) -> LogitsProcessor:
        if issubclass(cls, SlotLogitsProcessor):
            return SlotAdapter(cls, self._config, self._device)
        return cls(self._config, self._device, self._device.type == "cuda")

    def _run(
        self, processors: Sequence[LogitsProcessor], logits: Tensor, slots: np.ndarray, chosen: np.ndarray
    ) -> Errors:
        if not processors:
            return {}
        indices = self._batch.indices(slots)
        row_of = {index: row for row, index in enumerate(indices.tolist()) if chosen[row]}
        errors: Errors = {}
        for processor in processors:
            if _acts_by_row(processor):
                own = {index: logits[row_of[index]] for index in processor.req_info if index in row_of}
                failed = processor.apply_to_rows(own)
            else:
                failed = self._run_on_batch(processor, logits, indices, chosen)
            name = processor_name(processor)
            errors.update({row_of[i]: failure_message(name, error) for i, error in failed.items() if i in row_of})
        return errors

    def _run_on_batch(
        self, processor: LogitsProcessor, logits: Tensor, indices: np.ndarray, chosen: np.ndarray
    ) -> dict[int, Exception]:
        """Returns the errors of single requests, by index."""
        batch = logits
        if not (chosen.all() and np.array_equal(indices, np.arange(len(self._batch)))):
            # In the batch's order, with zeros for requests that do not sample in this step.
            batch = logits.new_zeros((len(self._batch), logits.shape[1]))
            batch[upload(indices, logits.device)] = logits
        errors: dict[int, Exception] = {}
        try:
            result = processor.apply(batch)
            check_result(result, batch)
        except RequestProcessorsFailed as failed:
            result, errors = batch, failed.errors
        except Exception as error:
            raise _failure(processor, error) from error
        if result is not logits:
            rows = np.flatnonzero(chosen)
            logits[upload(rows, logits.device)] = result[upload(indices[rows], logits.device)].to(torch.float32)
        return errors


def _acts_by_row(processor: LogitsProcessor) -> TypeGuard[AdapterLogitsProcessor | SlotAdapter]:
    return isinstance(processor, (AdapterLogitsProcessor, SlotAdapter)) and processor.acts_by_row


def _failure(processor: LogitsProcessor | type[LogitsProcessor], error: Exception) -> LogitsProcessorError:
    return LogitsProcessorError(failure_message(processor_name(processor), error))


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


class SlicedCustomProcessors(CustomProcessors):
    """CustomProcessors with the processors, and the errors of requests, on rank 0. A LogitsProcessorError is raised on
    all ranks, with rank 0's message."""

    def __init__(self, config: VllmConfig, device: torch.device, vocab: SlicedVocab) -> None:
        self._vocab = vocab
        # Rank 0's answers, known to all ranks from `update_state` on.
        self._needs_all_rows = {True: False, False: False}  # by whether all rows are greedy
        self._touched = np.empty(0, dtype=bool)
        self._has_argmax_invariant = False
        super().__init__(config, device)

    def _build(self) -> None:
        if self._vocab.slice.group.rank == 0:
            super()._build()

    def needs_all_rows(self, all_greedy: bool) -> bool:
        return self._needs_all_rows[all_greedy]

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return self._touched[slots]

    @property
    def has_argmax_invariant(self) -> bool:
        return self._has_argmax_invariant

    def update_state(self, slots: np.ndarray, states: RequestStates) -> None:
        error: LogitsProcessorError | None = None
        group = self._vocab.slice.group
        # Failed, needs_all_rows(True), needs_all_rows(False), has_argmax_invariant, touches(slots).
        update = np.zeros(4 + len(slots), dtype=np.int32)
        if group.rank == 0:
            try:
                super().update_state(slots, states)
                needs = super().needs_all_rows
                update[1:4] = needs(True), needs(False), super().has_argmax_invariant
                update[4:] = super().touches(slots)
            except LogitsProcessorError as raised:
                error, update[0] = raised, 1
        update = group.broadcast(upload(update, self._device)).cpu().numpy()
        _raise_together(bool(update[0]), error)
        self._needs_all_rows = {True: bool(update[1]), False: bool(update[2])}
        self._has_argmax_invariant = bool(update[3])
        self._touched = np.zeros(int(slots.max()) + 1, dtype=bool)
        self._touched[slots] = update[4:].astype(bool)

    def apply(self, logits: Tensor, slots: np.ndarray) -> Errors:
        rows = np.flatnonzero(self._touched[slots] | self._needs_all_rows[True])
        run = super().apply
        return _on_rank_0(self._vocab, logits, rows, lambda whole: run(whole, slots[rows]))

    def apply_argmax_invariant(self, logits: Tensor, slots: np.ndarray, chosen: np.ndarray) -> Errors:
        if not (self._has_argmax_invariant and chosen.any()):
            return {}
        run = super().apply_argmax_invariant
        return _on_rank_0(self._vocab, logits, np.arange(len(slots)), lambda whole: run(whole, slots, chosen))


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
