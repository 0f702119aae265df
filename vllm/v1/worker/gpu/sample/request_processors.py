"""`SamplingParams.logits_processors`: callables of single requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.request import BoundProcessor, failure_message
from vllm.v1.sample.logits_processor.state import TokenLists
from vllm.v1.worker.gpu.states import RequestStates


class RequestProcessorsState:
    """The callables of every slot that has any."""

    def __init__(self) -> None:
        self._callables: dict[int, list[Callable[..., Any]]] = {}
        self._bound: dict[int, tuple[TokenLists, list[BoundProcessor]]] = {}  # of those that have sampled

    @property
    def in_use(self) -> bool:
        """Whether any slot has callables."""
        return bool(self._callables)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """Keep the callables of the request that takes `slot`."""
        self.remove_request(slot)
        if params.logits_processors:
            self._callables[slot] = params.logits_processors

    def remove_request(self, slot: int) -> None:
        """Drop the slot's callables."""
        self._callables.pop(slot, None)
        self._bound.pop(slot, None)

    def uses(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: rows with callables."""
        return np.fromiter((slot in self._callables for slot in slots.tolist()), dtype=bool, count=len(slots))

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates) -> dict[int, str]:
        """Process float32 [R, V] in place, each row by its request's callables in their order.

        Returns:
            Row -> message, for rows whose callable raised or returned no logits. The row is then meaningless.
        """
        errors: dict[int, str] = {}
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
