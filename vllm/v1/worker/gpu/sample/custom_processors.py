"""Custom logits processors over the slots: built, updated with the batch, and run on its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.adapter import AdapterLogitsProcessor, RequestProcessorsFailed
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.logits_processor.request import check_result, failure_message, processor_name
from vllm.v1.sample.logits_processor.state import PersistentBatch
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.states import RequestStates


class LogitsProcessorError(RuntimeError):
    """A processor of the whole batch failed; the message names it."""


class CustomProcessors:
    """The engine's custom processors and the batch that they see.

    Once one of them has failed, the state of all is undefined: `discard` drops them, and the next step builds new ones
    and adds every request again. Every method that builds or runs them raises LogitsProcessorError.
    """

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
        """Whether there are argmax-invariant processors."""
        return bool(self._invariant)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """The request takes `slot`."""
        self._batch.add_request(slot, params)

    def remove_request(self, slot: int) -> None:
        """The slot's request has finished or was preempted."""
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

    def apply(self, logits: Tensor, slots: np.ndarray) -> dict[int, str]:
        """Run the processors that may change the most likely token on float32 [R, V], in place.

        Returns:
            Row -> message, for the rows whose request's own processor failed.
        """
        return self._run(self._others, logits, slots, np.ones(len(slots), dtype=bool))

    def apply_argmax_invariant(self, logits: Tensor, slots: np.ndarray, chosen: np.ndarray) -> dict[int, str]:
        """Like `apply`, with the other processors, on the `chosen` rows (bool [R]) only."""
        return self._run(self._invariant, logits, slots, chosen) if chosen.any() else {}

    def _build(self) -> None:
        invariant: list[LogitsProcessor] = []
        others: list[LogitsProcessor] = []
        for cls in self._config.model_config.logits_processors:
            try:
                processor = cls(self._config, self._device, self._device.type == "cuda")
                (invariant if processor.is_argmax_invariant() else others).append(processor)
            except Exception as error:
                raise _failure(cls, error) from error
        self._invariant, self._others = invariant, others
        self._processors = [*others, *invariant]

    def _run(
        self, processors: Sequence[LogitsProcessor], logits: Tensor, slots: np.ndarray, chosen: np.ndarray
    ) -> dict[int, str]:
        if not processors:
            return {}
        indices = self._batch.indices(slots)
        row_of = {index: row for row, index in enumerate(indices.tolist()) if chosen[row]}
        errors: dict[int, str] = {}
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


def _acts_by_row(processor: LogitsProcessor) -> TypeGuard[AdapterLogitsProcessor]:
    return isinstance(processor, AdapterLogitsProcessor) and processor.acts_by_row


def _failure(processor: LogitsProcessor | type[LogitsProcessor], error: Exception) -> LogitsProcessorError:
    return LogitsProcessorError(failure_message(processor_name(processor), error))
