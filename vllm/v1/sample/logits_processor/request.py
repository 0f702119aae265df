"""Processors of single requests: callables over one row of logits, and their adapter to the batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.checks import num_arguments
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

RequestLogitsProcessor = (
    Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)
"""(output ids, logits [V]) or (prompt ids, output ids, logits [V]) -> logits [V], the argument or a new tensor."""


T = TypeVar("T")


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Apply a batch update (None: nothing to do) to a dict of index -> entry, in place; whether anything in it changed.
    `new_state` gives an added request's entry from its parameters, prompt and output token ids; None = no entry."""
    if batch_update is None:
        return False
    changed = False
    for index in batch_update.removed:
        changed |= req_entries.pop(index, None) is not None
    for index, params, prompt_ids, output_ids in batch_update.added:
        changed |= _place(req_entries, index, new_state(params, prompt_ids, output_ids))
    for a, b, direction in batch_update.moved:
        from_a, from_b = req_entries.pop(a, None), req_entries.pop(b, None)
        changed |= _place(req_entries, b, from_a)
        if direction is MoveDirectionality.SWAP:
            changed |= _place(req_entries, a, from_b)
        changed |= from_b is not None
    return changed


def _place(entries: dict[int, T], index: int, entry: T | None) -> bool:
    """Replace the entry at the index; returns whether that changed anything."""
    before = entries.pop(index, None)
    if entry is not None:
        entries[index] = entry
    return entry is not None or before is not None


class WrongResultError(ValueError):
    """A processor returned something that cannot be logits; the message says what."""


class BoundProcessor:
    """A callable with its request's token ids."""

    def __init__(self, processor: Callable[..., Any], prompt_ids: list[int] | None, output_ids: list[int]) -> None:
        """`processor` takes (logits [1, V]), (output_ids, logits [V]) or (prompt_ids, output_ids, logits [V]), else
        TypeError is raised; it returns the processed logits, or None when it has changed them in place. `output_ids` is
        passed on as the same object, so it should grow with the request."""
        self.name = processor_name(processor)
        count = num_arguments(processor)
        if count not in (1, 2, 3):
            raise TypeError(f"{self.name} must take (output_ids, logits) or (prompt_ids, output_ids, logits)")
        self._processor = processor
        self._token_ids = ((), (output_ids,), (prompt_ids, output_ids))[count - 1]
        self._takes_matrix = count == 1

    def apply(self, row: torch.Tensor) -> None:
        """Process float32 [V] in place. Raises WrongResultError, or what the callable raised."""
        given = row[None] if self._takes_matrix else row
        result = self._processor(*self._token_ids, given)
        if result is not None and result is not given:
            check_result(result, given)
            given.copy_(result)


def check_result(result: Any, given: torch.Tensor) -> None:
    """Raises WrongResultError when what a processor returned is not a tensor like the one that it was given."""
    if not isinstance(result, torch.Tensor):
        raise WrongResultError(f"{type(result).__name__}, not a tensor")
    if result.shape != given.shape:
        raise WrongResultError(f"a tensor of shape {tuple(result.shape)}, not {tuple(given.shape)}")
    if not result.is_floating_point():
        raise WrongResultError(f"a tensor of {result.dtype}, not of floating-point numbers")
    if result.device != given.device:
        raise WrongResultError(f"a tensor on {result.device}, not on {given.device}")


def processor_name(processor: Any) -> str:
    """The name of a function, a class or an instance's class, for messages."""
    return getattr(processor, "__name__", type(processor).__name__)


def failure_message(name: str, error: Exception) -> str:
    """The user's message when a processor fails."""
    if isinstance(error, WrongResultError):
        return f"logits processor {name} returned {error}"
    return f"logits processor {name} raised {type(error).__name__}: {error}"


class RequestProcessorsFailed(Exception):
    """Processors of some requests raised, `errors` by index in the batch; all others have run, in place."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__("; ".join(f"index {i}: {type(error).__name__}: {error}" for i, error in errors.items()))
        self.errors = errors


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs a separate processor for each request. A subclass defines `new_req_logits_processor` and
    `is_argmax_invariant`; its constructor, if any, must call this class's."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.req_info: dict[int, BoundProcessor] = {}  # index -> the request's processor and its token ids

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The processor of a request that joins the batch; None when its logits stay as they are. An exception from
        here, like one from the processor, ends this request alone."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bind)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """As LogitsProcessor's. Raises RequestProcessorsFailed when some of the requests' processors did."""
        errors = self.apply_to_rows({index: logits[index] for index in self.req_info})
        if errors:
            raise RequestProcessorsFailed(errors)
        return logits

    def apply_to_rows(self, rows: Mapping[int, torch.Tensor]) -> dict[int, Exception]:
        """Process in place single rows of the batch, index -> float32 [V]; rows without a processor stay as they are.
        Returns what the requests' processors raised, by index."""
        errors: dict[int, Exception] = {}
        for index, row in rows.items():
            processor = self.req_info.get(index)
            try:
                if processor is not None:
                    processor.apply(row)
            except Exception as error:
                errors[index] = error
        return errors

    @property
    def acts_by_row(self) -> bool:
        """Whether `apply` is not overridden, so that `apply_to_rows` may replace it."""
        return type(self).apply is AdapterLogitsProcessor.apply

    def _bind(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> BoundProcessor | None:
        try:
            processor = self.new_req_logits_processor(params)
            return None if processor is None else BoundProcessor(processor, prompt_ids, output_ids)
        except Exception as error:
            return _failing(error)


def _failing(error: Exception) -> BoundProcessor:
    """Replaces a processor that could not be created: its request fails, and the others keep their indices."""

    def fail(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise error

    return BoundProcessor(fail, None, [])
